"""Exits when it is imported."""

raise SystemExit(7)
