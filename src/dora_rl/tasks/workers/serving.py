"""The user's code as a worker calls it: rewards, and sessions of an environment.

Whatever the user's code raises becomes a failure in the answer. Requests and answers are JSON.
"""

import asyncio
import errno
import inspect
import json
from collections.abc import Callable
from typing import Any

from dora_rl.tasks.environments import as_step
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.names import import_object, label_of, said
from dora_rl.tasks.rewards import BUILT_IN, Bound, bind, combine, load_library
from dora_rl.tasks.workers.nursery import Servant
from dora_rl.tasks.workers.wire import LARGEST, Part, Program

_ROOM = 64  # bytes of the message around an answer


def build(program: Program) -> Servant:
    """Load what the program names; what cannot be loaded is a `TaskError`."""
    if program.kind == "score":
        return Scorer(
            [(part, bind(part.name, _load_reward(part), part.options)) for part in program.parts]
        )
    return Sessions(_load_environment(program.parts[0]))


def _load_reward(part: Part) -> Callable[..., Any]:
    function = part.function
    if isinstance(function, str):
        load_library(function)
        function = import_object(BUILT_IN.get(function, function), "task.reward")
    if not callable(function):
        raise TaskError(f"task.reward must be callable: `{label_of(part.function)}` is not.")
    return function  # type: ignore[no-any-return]


def _load_environment(part: Part) -> Callable[[], Any]:
    make = part.function
    if isinstance(make, str):
        make = import_object(make, "task.environment")
    if not callable(make):
        raise TaskError(
            f"task.environment must be a class, or a function that makes a session: "
            f"`{label_of(part.function)}` is neither."
        )
    if inspect.isclass(make):
        for method in ("reset", "step"):
            if not callable(getattr(make, method, None)):
                raise TaskError(f"task.environment has no `{method}`: `{part.name}`. Define it.")
    options = part.options

    def session() -> Any:
        return make(**options)

    return session


class _Caller:
    """Calls what is synchronous or asynchronous, the latter in one event loop for good."""

    spent = False

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # made in the worker, after its fork

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
        try:
            return said(error)
        except BaseException:  # its own words raise what they like
            return "what cannot be shown"


class Scorer(_Caller):
    """Weighted rewards of one response."""

    def __init__(self, parts: list[tuple[Part, Bound]]) -> None:
        super().__init__()
        self._parts = parts

    def handle(self, request: bytes) -> bytes:
        context = json.loads(request)
        results = []
        for part, reward in self._parts:
            try:
                results.append((part.name, part.weight, self._call(reward, context)))
            except BaseException as error:
                failure = f"reward `{part.name}` raised {self._failure(error)}"
                return _reply(failure=failure)
        try:
            total, values = combine(results)
        except TaskError as error:
            return _reply(failure=str(error))
        except BaseException as error:  # a value of the user's whose conversion raises
            return _reply(failure=f"what a reward returned raised {self._failure(error)}")
        return _reply(reward=total, parts=values)


class Sessions(_Caller):
    """The sessions of an environment that live in this worker, by number."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make
        self._sessions: dict[int, Any] = {}

    def handle(self, request: bytes) -> bytes:
        call = json.loads(request)
        number, what = call["session"], call["do"]
        try:
            if what == "open":
                session = self._sessions[number] = self._make()
                return _reply(
                    observation=_check_observation(self._call(session.reset, call["example"]))
                )
            if what == "step":
                step = as_step(self._call(self._sessions[number].step, call["text"]))
                return _reply(observation=step.observation, reward=step.reward, done=step.done)
            session = self._sessions.pop(number, None)
            close = getattr(session, "close", None)
            if close is not None:
                self._call(close)
            return _reply()
        except TaskError as error:
            return _reply(failure=str(error))
        except BaseException as error:
            name = {"open": "reset", "step": "step"}.get(what, "close")
            return _reply(failure=f"{name} raised {self._failure(error)}")


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
