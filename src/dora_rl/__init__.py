"""Asynchronous RL post-training with one policy version per trajectory and bounded staleness."""

__version__ = "0.1.0"
