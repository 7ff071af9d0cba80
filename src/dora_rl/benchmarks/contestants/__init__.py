"""What the benchmarks measure, each in a process of its own that loads once.

    serving   the child's side: the loop that answers requests, for every contestant
    process   the parent's side: start, ask, settle, end; and how a death is reported
    roster    who there is, and how each is started
    ours, hf, vllm, machine   one contestant a file, loaded by `serving`
    siblings, mover, step_parts   ours too: groups, moved trajectories, the parts of a train step
    publisher, transporter   the ends of a weight transport
    trl_process, trl_runs   TRL's side of `bench trl`

One JSON line goes in and one comes out. A contestant's file defines `load(**settings)`, which
returns an object whose methods are the requests. `serving` and `vllm` run in an environment
without this project: they import nothing of it.
"""
