"""Runs: the core's commands performed by real engines, a real trainer and real rewards.

`driver` translates between the core and the parts; `inline` and `local` carry its messages and
keep the time. The parts (`rollout`, `training`) know neither the core nor where they run.
"""
