"""How long a test waits for what must come about: beyond it, something hangs.

Machines are shared and some are slow, so this is a limit on hanging and never one on speed.
"""

PATIENCE_S = 600.0
