"""What a run looks like from outside: numbers, and a timeline. Imports the core only."""
