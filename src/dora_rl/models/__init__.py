"""The decoder of the embedded engine, its Hugging Face weights, and the machine it runs on.

Nothing here knows of versions, trajectories or runs. This file imports nothing, so that
`cpu` can be asked before torch is loaded.
"""
