"""What Landlock does not hold: modes, owners, times, attributes and locks of files, and reading."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.core.protocol.types import Version
from dora_rl.machine.fast_paths import on_linux
from dora_rl.sandbox import isolation
from dora_rl.sandbox.protocol import UserFunction
from dora_rl.tasks.scores import ScoreJob, ScorePool
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.isolation import skip_weaker
from tests.ordinary_user import run_as_ordinary_user
from tests.patience import PATIENCE_S
from tests.tasks import hostile

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not on_linux(), reason="what Linux alone can keep away"),
]
NO_NAMESPACES = "linux.unshare = lambda what: False"
WAYS = ["namespaces", "no namespaces"]
PROGRAM = """
    import os
    from dora_rl.sandbox import linux
    from dora_rl.tasks.scores import ScoreJob, ScorePool
    from dora_rl.sandbox.protocol import UserFunction
    from tests.tasks import hostile
    {patch}
    {setup}
    act = lambda response, example: hostile.act(response, example)
    part = UserFunction(name="act", function=act)
    with ScorePool([part], workers=1, timeout_s={patience}) as pool:
        told = pool.run(ScoreJob(response={attack!r}, example={{"files": {files!r}}}))
        print(os.geteuid(), pool.isolation.attributes, told)
        {then}
"""


def scored(attack: str, way: str, *, hidden: tuple[str, ...] = (), **example: Any) -> float:
    """What a reward gets done as whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "no namespaces":
            patch.setattr("dora_rl.sandbox.linux.unshare", lambda what: False)
        act = hostile.act
        part = UserFunction(name="act", function=lambda response, example: act(response, example))
        with ScorePool([part], workers=1, timeout_s=PATIENCE_S, hidden=hidden) as pool:
            if way == "namespaces" and pool.isolation.processes != "apart":
                skip_weaker("no namespaces here")
            outcome = pool.run(ScoreJob(response=attack, example=example))
    assert outcome.failure is None, outcome
    return outcome.reward


def scored_as_ordinary_user(
    attack: str, way: str, directory: Path, files: list[str], setup: str = "", then: str = ""
) -> str:
    patch = NO_NAMESPACES if way == "no namespaces" else ""
    program = PROGRAM.format(
        patch=patch, setup=setup, then=then, attack=attack, files=files, patience=PATIENCE_S
    )
    done = run_as_ordinary_user(program, directory)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("0 ")
    return done.stdout


def facts(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns


@pytest.mark.parametrize("way", WAYS)
def test_what_is_known_of_a_file_is_not_changed(way: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = [facts(path) for path in (tmp_path, victim)]
    assert scored("change attributes", way, files=[str(tmp_path), str(victim)]) == 0.0
    assert [facts(path) for path in (tmp_path, victim)] == before


@pytest.mark.parametrize("way", WAYS)
def test_nor_is_it_by_a_reward_of_an_ordinary_user(way: str, tmp_path: Path) -> None:
    files = [str(tmp_path), str(tmp_path / "victim")]
    setup = f"open({files[1]!r}, 'w').close()"
    said = scored_as_ordinary_user("change attributes", way, tmp_path, files, setup)
    assert "reward=0.0" in said and "failure=None" in said, said


def test_a_reward_changes_what_is_its_own(tmp_path: Path) -> None:
    assert scored("change own", "namespaces") == 1.0
    said = scored_as_ordinary_user("change own", "namespaces", tmp_path, [])
    assert " mounts " in said and "reward=1.0" in said, said


def test_where_nothing_can_be_mounted_no_mode_changes_at_all(tmp_path: Path) -> None:
    said = scored_as_ordinary_user("change own", "no namespaces", tmp_path, [])
    assert " filter " in said and "PermissionError" in said, said


def test_a_writable_directory_stays_writable_in_every_way(tmp_path: Path) -> None:
    act = hostile.act
    part = UserFunction(name="act", function=lambda response, example: act(response, example))
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S, writable=(str(tmp_path),)) as pool:
        if pool.isolation.attributes != "mounts":
            skip_weaker("nothing can be mounted here")
        example = {"files": [str(tmp_path)]}
        outcome = pool.run(ScoreJob(response="change attributes", example=example))
    assert outcome.reward > 0


def test_without_landlock_the_mounts_keep_it_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_rl.sandbox.linux.confine_files", lambda *_: False)
    example = {"directories": [str(tmp_path), "/tmp", "/", "/etc"], "files": []}
    act = hostile.act
    part = UserFunction(name="act", function=lambda response, example: act(response, example))
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S) as pool:
        if pool.isolation.attributes != "mounts":
            skip_weaker("nothing can be mounted here")
        assert pool.isolation.writes == "mounts"
        assert pool.run(ScoreJob(response="write outside", example=example)).reward == 0.0
        assert pool.run(ScoreJob(response="write inside")).reward == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_a_reward_cannot_hold_up_a_publication(way: str, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights", lock_timeout_s=0.0)
    tensors = {"w": torch.zeros(2)}
    store.publish(Version(0), tensors)
    locks = [str(tmp_path / "weights" / ".lock")]
    assert scored("lock", way, files=locks) == 0.0


@pytest.mark.parametrize("way", WAYS)
def test_nor_can_that_of_an_ordinary_user(way: str, tmp_path: Path) -> None:
    files = [str(tmp_path / "weights" / ".lock")]
    setup = (
        "from pathlib import Path; import torch; "
        "from dora_rl.transports.weights.shared_directory import WeightStore; "
        f"store = WeightStore(Path({files[0]!r}).parent, lock_timeout_s=0.0); "
        "store.publish(0, {'w': torch.zeros(2)})"
    )
    then = "store.publish(1, {'w': torch.ones(2)}); print('published')"
    said = scored_as_ordinary_user("lock", way, tmp_path, files, setup, then)
    assert "reward=0.0" in said and "published" in said, said


def test_the_lock_of_an_earlier_release_is_closed_to_readers(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    (tmp_path / ".lock").touch(mode=0o644)
    store.publish(Version(0), {"w": torch.zeros(2)})
    assert (tmp_path / ".lock").stat().st_mode & 0o444 == 0


def test_hidden_directories_are_not_seen(tmp_path: Path) -> None:
    secret, other = tmp_path / "run" / "ledger", tmp_path / "other"
    secret.parent.mkdir()
    secret.write_text("x")
    other.write_text("x")
    files = [str(secret), str(other)]
    assert scored("look at", "namespaces", files=files) == 2.0
    assert scored("look at", "namespaces", hidden=(str(secret.parent),), files=files) == 1.0


def test_a_directory_that_holds_the_scratch_directory_is_not_said_to_be_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    part = UserFunction(name="act", function="tests.tasks.hostile:act")
    with ScorePool([part], workers=1, timeout_s=PATIENCE_S, hidden=(str(tmp_path),)) as pool:
        assert pool.isolation.private == "readable"
        assert any("run directory" in gap for gap in pool.isolation.gaps())
        assert pool.run(ScoreJob(response="write inside")).reward == 1.0


@pytest.mark.parametrize(
    "name", [".npmrc", ".cargo/credentials.toml", ".m2/settings.xml", ".config/pip/pip.conf"]
)
def test_keys_of_package_registries_are_hidden(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = tmp_path / name, tmp_path / ".cargo" / "config"
    for path in (key, other):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("token")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert scored("look at", "namespaces", files=[str(key), str(other)]) == 1.0
    assert os.path.exists(key)


def test_what_hides_is_what_refuses_to_be_written(tmp_path: Path) -> None:
    assert isolation.hidden_by(str(tmp_path / "a"), (str(tmp_path),)) == str(tmp_path)
    assert isolation.hidden_by(str(tmp_path), ()) is None
