"""What this machine has, and which of it is used.

processor    cores and instruction sets
parent       a process that ends with its parent
fast_paths   the list of everything that depends on the machine, and how a trial of it ended
trials       the same trials, in a child process

Free of torch and of the other packages: the trials themselves are where the fast paths are used.
"""
