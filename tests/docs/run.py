"""Run what the documentation shows, as it is written: `python -m tests.docs.run [PAGE]…`.

Each page in a fresh copy of the work tree, with uncommitted changes; its blocks in order. A `sh`
block is one shell at the top of the copy; the Python blocks of a page are one program. The
commands at the top of an example are a page as well. Commands that CI runs by itself are left out,
and what stands by itself and is shown twice is run once. Exit code 0 if every one exits with 0.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.docs.commands import RUN_BY_CI, python_of
from tests.docs.pages import ROOT, Block, Page, Shown, examples, pages

LIMIT_S = 900.0  # of one command: a guard against what hangs, far above what any takes
OUTPUT_SHOWN = 60  # last lines of what failed
_RUNNING: set["subprocess.Popen[bytes]"] = set()
_OF_ITS_PAGE = re.compile(
    r"\b(runs|models)/|\bplanned\.toml\b"
)  # what a page writes and reads again


@dataclass(frozen=True)
class Outcome:
    """A command that has run: how long it took, and what went wrong."""

    shown: Shown
    seconds: float
    failure: str = ""

    def __str__(self) -> str:
        return f"{self.seconds:7.1f} s  {self.shown.place}: {self.shown.text}"


def copy_of(root: Path, target: Path) -> Path:
    """The work tree at `target`, without what git ignores, and with the same environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():  # not deleted since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    (target / ".venv").symlink_to(root / ".venv")
    return target


def repeated(shown: Iterable[Page]) -> frozenset[str]:
    """The places of commands that were shown before, and that stand by themselves."""
    seen: set[str] = set()
    places = []
    for command in (c for page in shown for block in page.of("sh") for c in block.commands()):
        text = command.text.removeprefix(".venv/bin/")
        alone = text.startswith("dora-rl ") and not _OF_ITS_PAGE.search(text)
        if text in seen and alone:
            places.append(command.place)
        seen.add(text)
    return frozenset(places)


def run_page(
    page: Page, copy: Path, limit_s: float = LIMIT_S, left_out: Collection[str] = ()
) -> Iterator[Outcome]:
    for block in page.of("sh"):
        yield from run_block(block, copy, limit_s, left_out)
    if page.of("python"):
        yield run_python(page, copy, limit_s)


def run_block(
    block: Block, copy: Path, limit_s: float = LIMIT_S, left_out: Collection[str] = ()
) -> Iterator[Outcome]:
    """Run a block in one shell, up to the first command that fails."""
    commands = [
        shown
        for shown in block.commands()
        if shown.text not in RUN_BY_CI and shown.place not in left_out
    ]
    if not commands:
        return
    with tempfile.TemporaryDirectory() as scratch:
        script, marks = Path(scratch) / "block.sh", Path(scratch)
        # A file for each command that has ended well: their times are when they ended.
        lines = [
            f'{shown.text}\n__code=$?; [ $__code -eq 0 ] || exit $__code; : >"{marks / str(i)}"'
            for i, shown in enumerate(commands)
        ]
        script.write_text("\n".join(lines) + "\n")
        last = time.time()
        failure = _execute(["bash", str(script)], copy, limit_s * len(commands))
        for i, shown in enumerate(commands):
            ended = (marks / str(i)).exists()
            now = (marks / str(i)).stat().st_mtime if ended else time.time()
            yield Outcome(shown, max(0.0, now - last), "" if ended else failure)
            last = now
            if not ended:
                return


def run_python(page: Page, copy: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run the Python of a page from a file, as a reader would; lines are those of the page."""
    block = page.of("python")[0]
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / f"{Path(page.file).stem}.py"
        script.write_text(python_of(page))
        begin = time.time()
        failure = _execute([str(copy / ".venv/bin/python"), str(script)], copy, limit_s)
        shown = Shown(f"{len(page.of('python'))} Python block(s)", page.file, block.line)
        return Outcome(shown, time.time() - begin, failure)


def _execute(command: Sequence[str], copy: Path, limit_s: float) -> str:
    """Empty if it exits with 0 in time; else what happened and the end of what it wrote."""
    environment = {
        **os.environ,
        "PATH": f"{copy / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy / "src"),  # before the environment's own, which is the original
    }
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _RUNNING.add(process)
        try:
            code = process.wait(limit_s)
            reason = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"not ended after {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _RUNNING.discard(process)
        output.seek(0)
        tail = output.read().splitlines()[-OUTPUT_SHOWN:]
    return "\n    | ".join([reason, *tail]) if reason else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.docs.run")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as docs/training.md")
    parser.add_argument("--jobs", type=int, default=1, help="pages that are run at once")
    options = parser.parse_args(arguments)
    chosen = options.pages
    shown = [*pages(), *examples()]
    found = [page for page in shown if not chosen or page.file in chosen]
    if not found:
        parser.error(f"no such page: {', '.join(chosen)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the children
    run = partial(run_shown, left_out=repeated(found))
    begin = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            outcomes = [outcome for page in pool.map(run, found) for outcome in page]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    failed = [outcome for outcome in outcomes if outcome.failure]
    print(f"{len(outcomes)} run in {time.monotonic() - begin:.0f} s, {len(failed)} failed")
    return 1 if failed else 0


def run_shown(page: Page, left_out: Collection[str] = ()) -> list[Outcome]:
    """Run a page in a copy of its own, and print what came of it."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="dora-rl-docs-") as scratch:
        for outcome in run_page(page, copy_of(ROOT, Path(scratch)), left_out=left_out):
            outcomes.append(outcome)
            print(f"{outcome}\n    {outcome.failure}" if outcome.failure else outcome, flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
