"""Measurements of the project's own parts, as ratios within one run.

May import: core. It must not know the simulator: a benchmark's world is as cheap as can be.
"""
