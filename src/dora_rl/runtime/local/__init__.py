"""A run as processes of one machine: the driver here, rollout and training beside it.

channel     messages over a socket pair
processes   a part's process: started, watched, ended
part        what such a process runs
runtime     the loop that carries the messages and keeps the time
"""
