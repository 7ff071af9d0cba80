"""What this machine has, and which of it is used.

processor    cores and instruction sets
fast_paths   the list of everything that depends on the machine, and how a trial of it ended

Free of torch and of the other packages: the trials themselves are where the fast paths are used.
"""
