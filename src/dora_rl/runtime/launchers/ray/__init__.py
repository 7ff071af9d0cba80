"""A run on a Ray cluster: the driver here, each worker beside an actor on some node.

settings       `[runtime.ray]`
installation   whether Ray is there, and what it must know before it is imported
cluster        the connection: a cluster of this machine for this run, or one that runs
actor          starts a worker's process on its node, and passes its bytes on
remote_worker  the driver's side of an actor
launcher       starts them, and carries their messages

The processes are those of `launchers.local`, with its messages and its transports: the run
directory is on a file system that all nodes share. Ray is imported here and nowhere else.
"""
