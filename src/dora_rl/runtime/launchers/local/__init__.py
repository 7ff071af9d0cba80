"""A run as processes of one machine: the driver here, rollout and training beside it.

channel     messages over a socket pair
processes   the process of a worker: started, watched, ended
forkserver  forks it, for which `forkserver_client` asks
worker      what such a process runs
launcher    starts them, and carries their messages
"""
