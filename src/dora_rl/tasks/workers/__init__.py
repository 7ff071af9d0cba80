"""Processes that judge what the policy wrote, and that can be killed.

    scores.ScorePool               rewards; a worker serves one response at a time
    sessions.EnvironmentPool       environments; many sessions in each worker

Both stand on `crew`, the driver's side, which starts one `nursery`. The nursery imports the
user's code once, under isolation, and forks a worker whenever one is needed: a killed worker is
replaced within milliseconds. Messages are length-prefixed msgpack, never pickle.
"""
