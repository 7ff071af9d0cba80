"""What the benchmarks of engines share: the numbers they take, prompts, a place for files."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dora_rl import extras
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine.processor import cores
from dora_rl.models import cpu
from dora_rl.models.config import ModelConfig

DTYPES = ("bfloat16", "float32")
_DEFAULT_THREADS = 2  # what a laptop can spare


def default_threads() -> int:
    return min(_DEFAULT_THREADS, cores())


def check_numbers(option: str, numbers: Sequence[int], example: str) -> None:
    """Refuse a list that is empty, names a number twice, or one below 1."""
    if not numbers:
        raise UserError(f"{option} is empty. Give whole numbers, as in `{example}`.")
    for number in numbers:
        check_number(option, number)
    if len(set(numbers)) < len(numbers):
        listed = ",".join(map(str, numbers))
        raise UserError(f"{option} names a number twice: `{listed}`. Name each once.")


def check_number(option: str, number: int, least: int = 1, why: str = "") -> None:
    if number < least:
        raise UserError(f"{option} must be >= {least}: `{number}`. {why}".rstrip())


def check_threads(threads: int) -> None:
    check_number("--threads", threads)
    if threads > cores():
        raise UserError(
            f"--threads must be <= {cores()}, the processors of this machine: `{threads}`."
        )


def check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(DTYPES)}: `{dtype}`.")


def check_context(context: int | None, tokens: int, options: str) -> None:
    """Refuse sequences that are longer than a model's context, as far as that is known."""
    if context is not None and tokens > context:
        raise UserError(
            f"{options} make sequences of {tokens} tokens, and the context of this model is "
            f"`{context}`. Give fewer."
        )


def check_phase(seconds: float) -> None:
    if seconds <= 0:
        raise UserError(f"--phase-seconds must be > 0: `{seconds:g}`.")


def fewer(done: int, wanted: int, seconds: float) -> str:
    """The note on repeats that were left out."""
    return f"{done} of {wanted} repeats within --phase-seconds {seconds:g}."


def prompts(seed: str, config: ModelConfig, count: int, tokens: int) -> list[list[int]]:
    """Random tokens; other seeds give other prompts, so that no cache can know them."""
    source = random.Random(seed)
    return [[source.randrange(config.vocab_size) for _ in range(tokens)] for _ in range(count)]


@contextmanager
def ready(user: str) -> Iterator[tuple[Path, list[str]]]:
    """A temporary directory, and what there is to say of the machine; `user` is a command."""
    extras.require(user, "engine")
    found = cpu.guard()  # here, so that the children inherit what it found
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-", ignore_cleanup_errors=True) as work:
        yield Path(work), [found] if found else []
