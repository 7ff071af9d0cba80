"""How bytes travel between the workers of a run, apart from the driver's messages.

samples   trajectories and prefixes of running ones: rollout workers write, the trainer reads
kv        running trajectories with their KV: one rollout worker writes, another reads
weights   versions: the trainer publishes, rollout workers install

The driver's messages hold references and no path to any of it: each worker is given its ends of
the transports by the launcher that started it. `shared_directory` is the implementation of each for
the workers of one machine: on a network file system a reader might not see at once what a writer
has written. Weights and KV have others, too; `objects` is their way through the object store of a
cluster. `handshake` is how processes prove that they belong together.
"""
