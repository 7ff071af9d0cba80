"""Where the workers of a run live, and how messages reach them.

inline     all in one process, on a logical clock: a function of the seed
local      processes of one machine
ray        the same processes on the nodes of a Ray cluster, each beside an actor
wall_clock the loop that the last two share, by the time of `wall_time`
registry   which of them carries a run
"""
