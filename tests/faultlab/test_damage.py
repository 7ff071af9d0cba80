"""Files of a run that are damaged, named, and put back unless newer ones have taken their place."""

import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.faultlab.damage import DamagedFiles


def make_run(run: Path) -> dict[str, bytes]:
    """A run's files, of made-up content."""
    files = {
        "config.toml": b"[run]",
        "journal.jsonl": b"1\n2\n3\n",
        "ledger.sqlite": b"pages",
        "ledger.sqlite-wal": b"frames",
        "checkpoints/step-10/model.safetensors": b"weights",
        "checkpoints/step-10/trainer/state.json": b"{}",
        "checkpoints/step-10/trainer/version-00000003/model.safetensors": b"moments",
        "weights/version-00000003/manifest.json": b"{}",
    }
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    return files


HIDDEN = ("weights/.lock", "weights/.publishing-1/manifest.json", "checkpoints/.saving-1/trainer/x")


def content(run: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in names}


@given(seed=st.integers(0, 2**32))
def test_one_file_is_damaged_and_restored(seed: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place, "run")
        before = make_run(run)
        for hidden in HIDDEN:
            (run / hidden).parent.mkdir(parents=True, exist_ok=True)
            (run / hidden).write_bytes(b"half of it")
        damaged = DamagedFiles(run, Path(place, "damaged"))
        said = damaged.damage_one(random.Random(seed))
        assert said is not None
        damaged.incarnation_started()
        name = said.split()[0]
        assert name in before
        assert {n for n, data in content(run, before).items() if data != before[n]} == {name}
        assert damaged.restore_named("error: something else is wrong") == []
        refused = f"error: `{run / name.removesuffix('-wal')}` is damaged"
        assert damaged.restore_named(refused) == [run / name]
        assert content(run, before) == before and not damaged.remaining


def test_a_database_is_restored_with_all_of_its_files(tmp_path: Path) -> None:
    before = make_run(tmp_path / "run")
    damaged = DamagedFiles(tmp_path / "run", tmp_path / "damaged")
    for other in set(before) - {"ledger.sqlite"}:
        (tmp_path / "run" / other).unlink()
    assert damaged.damage_one(random.Random(0)) is not None
    damaged.incarnation_started()
    (tmp_path / "run" / "ledger.sqlite-wal").write_bytes(b"of an incarnation that was refused")
    assert damaged.restore_named("ledger.sqlite")
    assert not (tmp_path / "run" / "ledger.sqlite-wal").exists()


def test_what_a_run_survived_is_not_put_back(tmp_path: Path) -> None:
    """But for files that never change, and whose damage may be found later."""
    run = tmp_path / "run"
    make_run(run)
    damaged = DamagedFiles(run, tmp_path / "damaged")
    rng = random.Random(1)
    for _ in range(50):
        damaged.damage_one(rng)
    assert sum(not file.lasting for file in damaged.remaining) == 1
    damaged.survived()
    damaged.incarnation_started()
    assert {file.part_of.name for file in damaged.remaining} == {"step-10", "version-00000003"}
    shutil.rmtree(run / "checkpoints" / "step-10")
    assert not damaged.restore_named("`step-10` is damaged")
    assert not (run / "checkpoints" / "step-10").exists()
    assert damaged.restore_named("`version-00000003` is damaged")


class Aim(random.Random):
    """Takes this file where there is a choice."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self._name = name

    def choice(self, options: Any) -> Any:
        """First of the kinds, then of the files of that kind."""
        if isinstance(options[0], str):
            wanted = [self._name.partition("/")[0]]
        else:
            wanted = [path for path in options if path.as_posix().endswith(f"/{self._name}")]
        assert len(wanted) == 1 and wanted[0] in options
        return wanted[0]


def damage(run: Path, name: str) -> DamagedFiles:
    """A run with this file damaged, and a driver that may say so."""
    make_run(run)
    damaged = DamagedFiles(run, run.with_name("damaged"))
    said = damaged.damage_one(Aim(name))
    assert said is not None and said.startswith(f"{name} ")
    damaged.incarnation_started()
    return damaged


STATE = "checkpoints/step-10/trainer/version-00000003/model.safetensors"
VERSION = "weights/version-00000003/manifest.json"


@pytest.mark.parametrize(
    ("name", "message", "named"),
    [
        (STATE, "the checkpoint `/run/checkpoints/step-10` is damaged", True),
        (STATE, "`/run/checkpoints/step-10/trainer/state.json` was altered", True),
        (STATE, "step-10 is damaged", True),
        (STATE, "see step-10.", True),
        (STATE, "`/run/checkpoints/step-100` is damaged", False),
        (STATE, "`/run/checkpoints/old-step-10` is damaged", False),
        (STATE, "`/elsewhere/step-10/model.safetensors` is damaged", False),
        (STATE, "`/run/weights/version-00000003` is damaged", False),
        (VERSION, "tensor in `/run/weights/version-00000003/manifest.json`", True),
        (VERSION, "`/run/checkpoints/step-10/trainer/version-00000003` is of another", False),
        (VERSION, "`/run/weights/version-00000030/manifest.json` is damaged", False),
        ("ledger.sqlite", "`/x/run/ledger.sqlite` is older than the run's files", True),
        ("ledger.sqlite-wal", "`/x/run/ledger.sqlite` is older than the run's files", True),
        ("ledger.sqlite-wal", "`run/ledger.sqlite-wal` is damaged", True),
        ("ledger.sqlite-wal", "`run/ledger.sqlite.bak` is damaged", False),
        ("config.toml", "unknown key. The run's configuration is `run/config.toml`.", True),
        ("config.toml", "unknown key in `/x/overrun/config.toml`", False),
        ("journal.jsonl", "`/x/run/journal.jsonl` was altered", True),
    ],
)
def test_a_damaged_file_is_named_by_whole_names(
    name: str, message: str, named: bool, tmp_path: Path
) -> None:
    damaged = damage(tmp_path / "run", name)
    assert damaged.restore_named(message) == ([tmp_path / "run" / name] if named else [])


def test_a_configuration_that_was_read_is_not_what_was_refused(tmp_path: Path) -> None:
    damaged = damage(tmp_path / "run", "config.toml")
    message = "the run failed: lower runtime.instances in `config.toml`"
    assert not damaged.restore_named(message, as_input=False)
    assert damaged.remaining


@pytest.mark.parametrize(
    ("name", "newer"),
    [
        ("journal.jsonl", "journal.jsonl"),
        ("ledger.sqlite", "journal.jsonl"),
        ("ledger.sqlite-wal", "journal.jsonl"),
        (VERSION, VERSION),
        (STATE, STATE),
    ],
)
def test_what_is_newer_than_its_copy_stays(name: str, newer: str, tmp_path: Path) -> None:
    """A ledger is newer if the journal is, which is written first."""
    run = tmp_path / "run"
    damaged = damage(run, name)
    (run / "new").write_bytes(b"written since")
    (run / "new").replace(run / newer)
    before = content(run, (name, newer))
    assert not damaged.restore_named("ledger.sqlite, journal.jsonl, step-10, version-00000003")
    assert content(run, (name, newer)) == before and not damaged.remaining
