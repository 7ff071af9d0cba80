"""How a run goes and what it came to, for people."""
