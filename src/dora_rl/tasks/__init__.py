"""What the policy is asked, and how its answers are judged: prompts, rewards, environments.

Torch-free, and it knows no runtime. Model output is hostile input: nothing here evaluates it,
and whatever judges it runs in processes that can be killed (`workers`). This file imports
nothing, so that those processes start quickly.
"""
