"""The contract's own types: what they refuse, and how they say it."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.errors import UserError
from dora_rl.engines import errors
from dora_rl.engines.base import Load, Request, Sampling, VersionLoad
from dora_rl.engines.errors import RequestRefused

LARGEST = 2**64 - 1


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0 and finite: `-1.0`. Use 0 for greedy."),
        ({"temperature": -1e-9}, "temperature must be >= 0 and finite: `-1e-09`."),
        ({"temperature": math.inf}, "temperature must be >= 0 and finite: `inf`."),
        ({"temperature": math.nan}, "temperature must be >= 0 and finite: `nan`."),
        ({"top_k": -1}, "top_k must be a whole number >= 0, below 2**31: `-1`. Use 0 for"),
        ({"top_p": 0.0}, "top_p must be in (0, 1]: `0.0`. Use 1 for no limit."),
        ({"top_p": 1.01}, "top_p must be in (0, 1]: `1.01`."),
        ({"top_p": math.nan}, "top_p must be in (0, 1]: `nan`."),
        ({"min_p": -0.1}, "min_p must be in [0, 1]: `-0.1`. Use 0 for no limit."),
        ({"min_p": 1.1}, "min_p must be in [0, 1]: `1.1`."),
        ({"min_p": math.nan}, "min_p must be in [0, 1]: `nan`."),
        ({"max_tokens": 0}, "max_tokens must be a whole number >= 1, below 2**31: `0`."),
        ({"stop_token_ids": (3, -2)}, "stop_token_ids must hold whole numbers from 0 up: `-2`."),
        ({"stop": ("a", "")}, "stop must be a tuple of strings that are not empty: `('a', '')`."),
    ],
)
def test_sampling_out_of_range_is_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        Sampling(**wish)
    assert str(refusal.value).startswith(message)


@given(
    temperature=st.floats(0, allow_infinity=False),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    max_tokens=st.integers(1, 2**31 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
)
def test_sampling_in_range_is_taken_as_it_is(**wishes: Any) -> None:
    sampling = Sampling(**wishes)
    assert {name: getattr(sampling, name) for name in wishes} == wishes


def test_defaults_change_nothing_of_the_model() -> None:
    plain = Sampling()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (1.0, 0, 1.0, 0.0)
    assert not plain.ignore_eos
    assert not plain.raw_logprobs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trajectory": -1}, "a trajectory id must be a whole number of 64 bits: `-1`."),
        ({"trajectory": LARGEST + 1}, f"a trajectory id must be .*: `{LARGEST + 1}`."),
        ({"seed": -1}, "seed must be a whole number of 64 bits: `-1`."),
        ({"seed": LARGEST + 1}, f"seed must be .*: `{LARGEST + 1}`."),
        ({"prompt": ()}, "the prompt of trajectory 5 is empty. Give at least one token"),
        ({"prefix": (1,) * 4}, "the prefix of trajectory 5 has 4 tokens and max_tokens is 4:"),
        ({"prefix": (1,) * 9}, "the prefix of trajectory 5 has 9 tokens and max_tokens is 4:"),
        ({"turn_start": 4}, "turn_start must be within the prefix, from 0 to 3: `4`."),
        ({"turn_start": -1}, "turn_start must be within the prefix, from 0 to 3: `-1`."),
    ],
)
def test_a_request_that_means_nothing_is_refused(change: dict[str, Any], message: str) -> None:
    good = Request(5, 0, (1, 2), Sampling(max_tokens=4), prefix=(1, 2, 3))
    with pytest.raises(RequestRefused, match=message):
        dataclasses.replace(good, **change)


@given(
    trajectory=st.integers(0, LARGEST),
    seed=st.integers(0, LARGEST),
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple),
    prefix=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
)
def test_other_requests_are_taken(
    trajectory: int, seed: int, prompt: tuple[int, ...], prefix: tuple[int, ...]
) -> None:
    sampling = Sampling(max_tokens=len(prefix) + 1)
    request = Request(trajectory, 0, prompt, sampling, seed, prefix, turn_start=len(prefix))
    assert request.prefix[: request.turn_start] == prefix
    assert not request.hold
    assert hash(request) == hash(dataclasses.replace(request))


def test_values_do_not_change() -> None:
    request = Request(1, 0, (1,))
    for value, name in ((request, "version"), (request.sampling, "temperature")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)


def test_a_load_adds_up() -> None:
    versions = {3: VersionLoad("a", 2, 1, 4, 1.5, held=9), 5: VersionLoad("b", 3, 7, 0, 0.0)}
    load = Load(8, 2, 100, 200, versions)
    assert (load.running, load.waiting) == (5, 8)
    empty = Load(8, 2, 0, 200, {})
    assert (empty.running, empty.waiting) == (0, 0)


@pytest.mark.parametrize(
    "name", ["RequestRefused", "VersionRefused", "ImportRefused", "UnknownTrajectory"]
)
def test_every_refusal_is_an_error_of_the_user(name: str) -> None:
    refusal = getattr(errors, name)
    assert issubclass(refusal, UserError)
    others = {errors.RequestRefused, errors.VersionRefused, errors.ImportRefused} - {refusal}
    assert not issubclass(refusal, tuple(others))


@pytest.mark.parametrize(
    "change",
    [
        {"trajectory": True},
        {"trajectory": 1.0},
        {"seed": 0.5},
        {"prompt": [1, 2]},
        {"prompt": (1, 2.0)},
        {"prompt": (True, 2)},
        {"prompt": "ab"},
        {"prefix": [1]},
        {"hold": 1},
        {"hold": None},
        {"turn_start": 0.0},
        {"turn_start": False},
        {"prompt": (-1,)},
    ],
    ids=str,
)
def test_requests_of_other_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        Request(**{"trajectory": 1, "version": 0, "prompt": (1, 2), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 2**63},
        {"top_k": 1.5},
        {"max_tokens": 2**31},
        {"max_tokens": True},
        {"temperature": "1"},
        {"top_p": None},
        {"stop": "ab"},
        {"stop": ("\ud800",)},
        {"stop": (1,)},
        {"stop_token_ids": [3]},
        {"stop_token_ids": (3.0,)},
    ],
    ids=ascii,
)
def test_samplings_of_other_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        Sampling(**change)
