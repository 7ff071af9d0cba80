"""`one_file_dora.py` keeps its promises, and its audit notices when they are broken."""

import ast
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "examples" / "one_file_dora.py"


@pytest.fixture(scope="module")
def dora() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("one_file_dora", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def start(dora: ModuleType) -> object:
    return dora.warm_start(num_updates=60)


@pytest.fixture(params=[0, 1, 3])
def finished(request: pytest.FixtureRequest, dora: ModuleType, start: object) -> tuple[object, int]:
    return dora.run(start, request.param, 8), request.param


def test_it_is_short_and_needs_torch_alone() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) < 300
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
    }
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_every_group_is_trained_once_by_its_deadline(
    dora: ModuleType, finished: tuple[object, int]
) -> None:
    result, bound = finished
    dora.audit(result, bound)
    assert len(result.groups) == 8 * dora.GROUPS_PER_STEP
    assert {len(group.members) for group in result.groups} == {dora.GROUP_SIZE}
    assert result.most_versions <= bound + 1


def test_more_versions_take_fewer_decode_steps(dora: ModuleType, start: object) -> None:
    sync, ours = dora.run(start, 0, 8), dora.run(start, 3, 8)
    assert ours.most_versions > 1
    assert sync.decode_steps > 1.5 * ours.decode_steps


def test_a_response_does_not_depend_on_its_neighbours(dora: ModuleType, start: object) -> None:
    def responses(alone: bool) -> list[list[int]]:
        asked = [dora.Trajectory(f"{n}", dora.make_prompt(f"{n}")) for n in range(6)]
        for batch in [[t] for t in asked] if alone else [asked]:
            instance = dora.Instance(0, start, batch)
            while instance.running:
                instance.decode()
        return [t.response for t in asked]

    assert responses(alone=True) == responses(alone=False)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda group: group.members[1].digests.add("other"), "not one version"),
        (lambda group: group.trained_at.clear(), "lost, or trained twice"),
        (lambda group: group.trained_at.append(7), "lost, or trained twice"),
        (lambda group: group.trained_at.__setitem__(0, group.deadline + 1), "too old"),
    ],
)
def test_the_audit_notices(dora: ModuleType, start: object, harm: object, words: str) -> None:
    result = dora.run(start, 1, 2)
    harm(random.Random(0).choice(result.groups))
    with pytest.raises(AssertionError, match=words):
        dora.audit(result, 1)


@given(deadlines=st.lists(st.integers(0, 4), max_size=40), new=st.integers(0, 4))
def test_admission_leaves_all_groups_trainable_in_time(
    dora: ModuleType, deadlines: list[int], new: int
) -> None:
    groups = [dora.Group(0, deadline, []) for deadline in deadlines]
    admitted = dora.may_start(groups, new, next_step=0)
    # By exhaustion: a step takes the earliest deadlines, and none may be late.
    due = sorted([*deadlines, new])
    on_time = all(deadline >= n // dora.GROUPS_PER_STEP for n, deadline in enumerate(due))
    assert admitted == (on_time and len(due) <= dora.DEPTH)


def test_rewards_are_for_right_responses(dora: ModuleType) -> None:
    assert dora.solution((7, 2, 3)) == [9, 12, 1, 11, 3, dora.END]
    right = dora.Trajectory("", (7, 2, 3), [9, 12, 1, 11, 3, dora.END])
    wrong = dora.Trajectory("", (7, 2, 3), [9, 12, 1, 11, 4, dora.END])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
