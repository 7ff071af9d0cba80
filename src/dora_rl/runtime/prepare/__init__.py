"""From a configuration, or Python objects, to a plan: everything is checked, nothing written."""
