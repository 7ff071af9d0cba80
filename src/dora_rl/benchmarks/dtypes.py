"""In which numbers a model is measured: those that this machine is good at, unless one is named.

A processor without instructions for bfloat16 multiplies it many times as slowly as float32, so
that a default of bfloat16 would measure a way in which nobody runs a model there.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.contestants import roster
from dora_rl.benchmarks.contestants.process import start_all
from dora_rl.benchmarks.models import TINY, Model, open_model
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.models import packaged

# bfloat16 halves the bytes that a step reads, so somewhat slower products do not rule it out.
FAR_SLOWER = 4.0
# The largest product and the seconds of each dtype: a difference of this size shows at once. On
# one thread, as threads that wait for each other measure whatever else keeps the machine busy.
_QUICK = {"mm_size": 512, "budget_s": 0.5}
_THREADS = 1


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The numbers of a measurement, and why it is these."""

    dtype: str | None  # None: the model's own
    reason: str = ""
    mm_flops_per_s: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason, "mm_flops_per_s": dict(self.mm_flops_per_s)}


def choose(peaks: Mapping[str, float]) -> DtypeChoice:
    """Between bfloat16 and float32, by operations per second of `torch.mm`."""
    far = peaks["float32"] > FAR_SLOWER * peaks["bfloat16"]
    dtype = "float32" if far else "bfloat16"
    figures = " and ".join(f"{peak / 1e9:.3g} in {name}" for name, peak in peaks.items())
    rule = "bfloat16 is far slower" if far else "bfloat16 is not far slower"
    reason = f"{dtype} was chosen, as {rule} here: GFLOP/s of torch.mm on one thread are {figures}."
    return DtypeChoice(dtype, reason, peaks)


def open_in_best_dtype(
    name: str, dtype: str | None, work: Path, reporter: Reporter
) -> tuple[Model, DtypeChoice]:
    """A model in the dtype that was named, else in the one that this machine is good at.

    A directory of the user's is measured in its own dtype. A packaged model that was fetched in
    the other dtype alone is converted.
    """
    if dtype is not None or (name != TINY and name not in packaged.MODELS):
        return open_model(name, dtype, work), DtypeChoice(dtype)
    with ExitStack() as stack:
        (machine,) = start_all(stack, [roster.machine(_THREADS)], work, reporter)
        reporter.phase("comparing bfloat16 with float32")
        choice = choose(machine.ask("peaks", **_QUICK))
    assert choice.dtype is not None
    if name in packaged.MODELS and not packaged.place(name, choice.dtype).is_dir():
        for other in packaged.DTYPES:
            if (fetched := packaged.place(name, other)).is_dir():
                return _converted(name, other, fetched, choice, work)
    return open_model(name, choice.dtype, work), choice


def _converted(
    name: str, other: str, fetched: Path, choice: DtypeChoice, work: Path
) -> tuple[Model, DtypeChoice]:
    model = open_model(str(fetched), choice.dtype, work)
    reason = (
        f"{choice.reason} {name} was converted from {other}, as it is not fetched in this dtype: "
        f"dora-rl fetch-model {name} --dtype {choice.dtype}"
    )
    return replace(model, title=packaged.MODELS[name].title), replace(choice, reason=reason)
