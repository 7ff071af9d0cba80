"""Runs: the core's commands performed by real engines, a real trainer and real rewards.

control     the driver's process: performs the core's commands, supervises workers; no torch
workers     what runs inside a worker process: rollout, trainer
launchers   where workers live, and how messages reach them: inline, local
records     what a run writes down, and how it is resumed from that
prepare     from a configuration or Python objects to a plan; nothing is written yet
display     how a run goes, for people
"""
