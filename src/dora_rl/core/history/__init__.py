"""The history of a run: its journal, the codec of that, and the replay that checks it."""
