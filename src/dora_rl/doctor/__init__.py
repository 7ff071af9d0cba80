"""`dora-rl doctor`: what this machine has, what falls back, what is missing, what would fail.

examination   looks at the machine, one topic after the other
report        what was found, in words and as JSON
torch_build   asks torch about itself, in a process of its own
"""
