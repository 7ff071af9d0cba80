"""Measurements of the project's own parts, as ratios within one run.

orchestrator, world             the core alone, in a cheap world
control, control_fleet          the real driver under a large fleet that computes nothing
engine, speculation, versions, migration    the embedded engine; limits has its roofline
modes*, workloads*              the paradigms as real training; step_parts and floors have its limit
convergence, durability, resume, trl        whole runs, by `training`
transports                      a version's way to the engines

They must not know the simulator. What needs torch runs in the processes of `contestants/` or in the
workers of a run, or is imported where it is used.
"""
