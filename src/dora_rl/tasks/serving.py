"""The user's code as a worker calls it: rewards and environments.

Whatever the user's code raises becomes a failure in the answer. Requests and answers are JSON.
"""

import asyncio
import errno
import inspect
import json
from collections.abc import Callable
from typing import Any

from dora_rl.sandbox.objects import import_object, label_of, said
from dora_rl.sandbox.output import Captured, trace_of
from dora_rl.sandbox.protocol import LARGEST, Program, UserFunction
from dora_rl.sandbox.zygote import Service
from dora_rl.tasks.environments import as_step
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.rewards import BUILT_IN, Bound, bind, combine, load_library

_ROOM = 64  # bytes of the message around an answer


def scorer(program: Program) -> Service:
    """Load the rewards that the program names; what cannot be loaded is a `UserError`."""
    more = program.import_path
    return Scorer(
        [
            (given, bind(given.name, _load_reward(given, more), given.options))
            for given in program.functions
        ]
    )


def environments(program: Program) -> Service:
    """Load the environment that the program names."""
    return Environments(_load_environment(program.functions[0], program.import_path))


def _load_reward(given: UserFunction, more: tuple[str, ...]) -> Callable[..., Any]:
    function = given.function
    if isinstance(function, str):
        load_library(function)
        function = import_object(BUILT_IN.get(function, function), "task.reward", more)
    if not callable(function):
        raise TaskError(f"task.reward must be callable: `{label_of(given.function)}` is not.")
    return function  # type: ignore[no-any-return]


def _load_environment(given: UserFunction, more: tuple[str, ...]) -> Callable[[], Any]:
    make = given.function
    if isinstance(make, str):
        make = import_object(make, "task.environment", more)
    if not callable(make):
        raise TaskError(
            f"task.environment must be a class, or a function that makes one: "
            f"`{label_of(given.function)}` is neither."
        )
    if inspect.isclass(make):
        for method in ("reset", "step"):
            if not callable(getattr(make, method, None)):
                raise TaskError(f"task.environment has no `{method}`: `{given.name}`. Define it.")
    options = given.options

    def environment() -> Any:
        return make(**options)

    return environment


class _Caller:
    """Calls what is synchronous or asynchronous, the latter in one event loop for good."""

    spent = False

    def __init__(self) -> None:
        self._trace = ""
        self._output = Captured()
        self._loop: asyncio.AbstractEventLoop | None = None  # made in the worker, after its fork

    def handle(self, request: bytes) -> bytes:
        """The answer to a request, with what the user's code printed for it."""
        self._trace = ""
        with self._output as printed:
            answer = self._answer(json.loads(request))
        return _reply(**answer, output=printed.text() + self._trace)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)

        async def whole() -> Any:
            return await result

        return self._loop.run_until_complete(whole())

    def _failure(self, error: BaseException) -> str:
        # Memory and files that were refused once will be refused again; and what exits wants to.
        self.spent = (
            not isinstance(error, Exception)
            or isinstance(error, MemoryError)
            or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE))
        )
        self._trace = trace_of(error)
        try:
            return said(error)
        except BaseException:  # its own words raise what they like
            return "what cannot be shown"


class Scorer(_Caller):
    """Weighted rewards of one response."""

    def __init__(self, rewards: list[tuple[UserFunction, Bound]]) -> None:
        super().__init__()
        self._rewards = rewards

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        results = []
        for given, reward in self._rewards:
            try:
                results.append((given.name, given.weight, self._call(reward, asked)))
            except BaseException as error:
                failure = f"reward `{given.name}` raised {self._failure(error)}"
                return {"failure": failure}
        try:
            total, values = combine(results)
        except TaskError as error:
            return {"failure": str(error)}
        except BaseException as error:  # a value of the user's whose conversion raises
            return {"failure": f"what a reward returned raised {self._failure(error)}"}
        return {"reward": total, "parts": values}


class Environments(_Caller):
    """The environments in this worker, one for each of its episodes, by the episode's number."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make
        self._environments: dict[int, Any] = {}

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        number, what = asked["episode"], asked["do"]
        try:
            if what == "open":
                environment = self._environments[number] = self._make()
                observation = self._call(environment.reset, asked["example"])
                return {"observation": _check_observation(observation)}
            if what == "step":
                step = as_step(self._call(self._environments[number].step, asked["text"]))
                return {"observation": step.observation, "reward": step.reward, "done": step.done}
            environment = self._environments.pop(number, None)
            close = getattr(environment, "close", None)
            if close is not None:
                self._call(close)
            return {}
        except TaskError as error:
            return {"failure": str(error)}
        except BaseException as error:
            name = {"open": "reset", "step": "step"}.get(what, "close")
            return {"failure": f"{name} raised {self._failure(error)}"}


def _check_observation(observation: Any) -> Any:
    """What `reset` may return: text, messages, or nothing for the row's own prompt."""
    from dora_rl.tasks.prompts import check_messages

    if observation is None or isinstance(observation, str):
        return observation
    problem = check_messages(observation)
    if problem is None:
        return observation
    raise TaskError(f"reset must return text, messages or None: {problem}")


def _reply(**fields: Any) -> bytes:
    content = json.dumps(fields).encode()
    if len(content) > LARGEST - _ROOM:
        return _reply(failure=f"an answer of {len(content)} bytes is too large")
    return content
