"""What this machine has, and which of it is used.

processor    cores and instruction sets
cgroups      what a container or a batch system leaves of them
gpus         whether there may be one
parent       a process that ends with its parent
cycle_search, heap   how a process finds its cycles, and keeps memory that it frees
user_cache   where this user keeps what can be made again
run_module   a module of this package by a Python that lacks it
fast_paths   the list of everything that depends on the machine, and how a trial of it ended
trials       the same trials, in a child process

Free of torch and of the other packages: the trials themselves are where the fast paths are used.
"""
