"""Bytes through the object store of a cluster, for workers that do not know the cluster's library.

    worker  ==  socket pair  ==  gateway  --  object store  --  host of another worker

store      what a cluster has: objects by reference; and one in memory, for tests
host       what the process beside a worker has for others: files of versions, KV
gateway    performs what a worker asks for, in the process beside it
link       the worker's end, and what it can ask for
scratch    a directory of one worker on its own node

The process beside the worker is one that the cluster runs, on the same node: it puts and gets,
and passes bytes on to the worker as files. Whoever must be asked for something is introduced to
the gateway with the very message that makes the worker want it. Free of torch.
"""
