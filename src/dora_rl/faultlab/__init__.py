"""Real training under random faults, and an audit at the end: `dora-rl chaos`."""
