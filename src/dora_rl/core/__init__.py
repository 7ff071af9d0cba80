"""Everything that DORA decides, as a pure state machine; it performs nothing.

No I/O, no clock, no threads, no asyncio, no randomness: the same events give the same
commands, in a simulation as on a cluster.
"""
