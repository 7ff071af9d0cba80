"""Measurements of the project's own parts, as ratios within one run.

They must not know the simulator: a benchmark's world is as cheap as can be. `orchestrator` and
`world` need the core alone; `engine`, `migration` and `versions` need torch, and the processes in
`contestants/` whatever they run.
"""
