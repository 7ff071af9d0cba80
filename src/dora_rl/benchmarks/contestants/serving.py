"""The child's side of the protocol, as a program: `python -P serving.py CONTESTANT.py`.

A request is a line `{"id": 1, "do": "generate", "with": {…}}`, its answer a line
`{"id": 1, "done": …}`. The first request is `load`. An error ends the process with its traceback
on stderr, and the end of stdin ends it in peace. Standard library only: it also runs in
environments that do not have this project.
"""

import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import IO, Any


def main() -> None:
    requests, answers = _take_over()
    module = _import(sys.argv[1])
    contestant: Any = None
    for line in requests:
        request = json.loads(line)
        if request["do"] == "load":
            contestant, done = module.load(**request["with"]), None
        else:
            done = getattr(contestant, request["do"])(**request["with"])
        answers.write(json.dumps({"id": request["id"], "done": done}) + "\n")
        answers.flush()


def _take_over() -> tuple[IO[str], IO[str]]:
    """The pipes of the protocol for us alone: what a library prints goes to stderr."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _import(path: str) -> ModuleType:
    """By path: a file named as the library that it imports must not be found in its place."""
    spec = importlib.util.spec_from_file_location("contestant", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["contestant"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
