"""Programs that a policy wrote, run apart from the reward that judges them.

python       `run_python`, for whoever runs a program
__main__     the supervisor: a process between the two, which sets the limits and ends everybody
"""
