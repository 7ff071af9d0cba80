"""`logs/rewards.log`: harmless to read, bounded, and kept over a resume."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.runtime.records import reward_log
from dora_rl.runtime.records.reward_log import LARGEST, RewardLog, printable
from tests.runtime.harness import run


@given(st.text())
def test_nothing_in_it_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert shown == text or not all(c.isprintable() or c in "\n\t" for c in text)


def test_every_entry_has_a_head_and_is_indented(tmp_path: Path) -> None:
    log = RewardLog(tmp_path / "logs" / "rewards.log")
    log.entry("trajectory 4", "one\ntwo\x1b[0m\r\n2026-01-01 00:00:00 trajectory 5\n\udc80")
    log.entry("evaluation", "")
    lines = (tmp_path / "logs" / "rewards.log").read_text().splitlines()
    heads = [line for line in lines if not line.startswith("  ")]
    assert [head.split(" ", 2)[2] for head in heads] == ["trajectory 4", "evaluation"]
    assert lines[1:5] == [
        "  one",
        "  two\\x1b[0m\\r",
        "  2026-01-01 00:00:00 trajectory 5",
        "  \\udc80",
    ]


def test_it_never_gets_larger_than_two_files(tmp_path: Path) -> None:
    log = RewardLog(tmp_path / "logs" / "rewards.log")
    for number in range(600):
        log.entry(f"trajectory {number}", "x" * 1_000_000)
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["rewards.log", "rewards.log.1"]
    assert all(file.stat().st_size <= LARGEST + 2 * reward_log._ENTRY for file in files)
    assert "trajectory 599" in files[0].read_text()


def test_a_note_is_there_once(tmp_path: Path) -> None:
    log = RewardLog(tmp_path / "logs" / "rewards.log")
    for _ in range(3):
        log.note_once("not kept from: the sea")
        log.entry("trajectory 1", "printed")
    text = (tmp_path / "logs" / "rewards.log").read_text()
    assert text.count("the sea") == 1 and text.count("  printed\n") == 3


def test_a_run_logs_what_its_rewards_print_by_trajectory(model: Path, tmp_path: Path) -> None:
    ended = run(
        model,
        tmp_path / "run",
        task={"reward": "tests.tasks.noisy:says"},
        run={"steps": 2, "checkpoint_every": 1},  # goes on anew after the first step
    )
    text = (ended.directory / "logs" / "rewards.log").read_text()
    heads = [line for line in text.splitlines() if " trajectory " in line and line[0] != " "]
    logged = [int(head.rpartition(" ")[2]) for head in heads]
    assert len(set(logged)) == len(logged) >= ended.audit.trained
    assert text.count("  a warning\n") == len(logged)
