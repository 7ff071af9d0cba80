"""What goes into the core and what comes out: types, events, commands, settings, paradigms, errors.

The one room of the core that the rest of the package builds on.
"""
