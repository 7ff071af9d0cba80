"""Where the workers of a run live, and how messages reach them.

inline     all in one process, on a logical clock: a function of the seed
local      processes of one machine
registry   which of them carries a run
"""
