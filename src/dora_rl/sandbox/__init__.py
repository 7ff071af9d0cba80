"""Processes with limits, for code that is not ours.

worker_pool     the driver's side: start, feed, watch, kill and replace workers
zygote          imports the user's code once, under isolation, and forks a worker when one is needed
isolation       what is taken from a process first: namespaces, Landlock, seccomp, limits
linux           the system calls for that
programs        programs that a policy wrote, run apart from the reward that judges them

    from dora_rl.sandbox import run_python

    done = run_python(code, stdin="3 4", timeout_s=5, memory_mb=256)
    reward = float(done.ok and done.stdout.split() == ["7"])

It knows neither rewards nor environments: a `Program` names the service that its workers build.
Messages are length-prefixed msgpack, never pickle.
"""

from dora_rl.sandbox.errors import SandboxError
from dora_rl.sandbox.programs.python import Execution, run_python

__all__ = ["Execution", "SandboxError", "run_python"]
