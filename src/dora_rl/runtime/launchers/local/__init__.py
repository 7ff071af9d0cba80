"""A run as processes of one machine: the driver here, rollout and training beside it.

channel     messages over a socket pair
processes   the process of a worker: started, watched, ended
forkserver  starts it in milliseconds
worker      what such a process runs
launcher    the loop that carries the messages and keeps the time
"""
