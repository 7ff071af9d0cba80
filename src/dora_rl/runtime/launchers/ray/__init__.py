"""A run on a Ray cluster: the driver here, each worker beside an actor on some node.

settings       `[runtime.ray]`
installation   whether Ray is there, and what it must know before it is imported
cluster        the connection: a cluster of this machine for this run, or one that runs
nodes          whether each node has what workers need
placement      placement groups: room on the nodes, and who is in it
actor          starts a worker's process on its node, and passes its bytes on
ranks          the other processes of a trainer, on other nodes
remote_worker  the driver's side of an actor
objects        Ray's object store behind the protocols of `transports.objects`
introductions  which actor a worker is to ask for what a message makes it want
lone_actors    actors without workers, for measurements of the object store
rewards        reward workers on nodes
drains         which nodes are told to go
launcher       starts them, and carries their messages

The processes are those of `launchers.local`, with its messages; the run directory is on a file
system that all nodes share. Ray is imported here and nowhere else.
"""
