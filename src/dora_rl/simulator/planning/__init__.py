"""Plans: which split, staleness bound, depth and version slots serve a cluster best.

`question` turns flags into a scenario, `reduction` makes it small, `bounds` says what cannot
win, `search` simulates what might, `verdict` chooses and says why, `fixed_costs` how sure that is.
"""

from dora_rl.simulator.planning.question import Problem, Question, pose
from dora_rl.simulator.planning.verdict import Plan, make_plan

__all__ = ["Plan", "Problem", "Question", "make_plan", "pose"]
