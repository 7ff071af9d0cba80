"""The paper's table, measured, fitted and predicted side by side (docs/calibration.md).

python benchmarks/calibration.py            # the table
python benchmarks/calibration.py --splits   # and the search of the splits
"""

import argparse

from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.observe.metrics import Summary
from dora_rl.simulator.scenarios import load_scenario
from dora_rl.simulator.simulate import simulate

# arXiv 2604.26256: step in minutes, rollout-only share, tokens per second.
PAPER: dict[int, dict[str, tuple[float, float | None, float]]] = {
    64: {
        "sync": (22.91, 0.65, 14_143),
        "one_step": (22.94, 0.33, 14_141),
        "partial": (17.38, 0.46, 19_872),
        "multi_version": (14.67, 0.12, 23_327),
    },
    128: {
        "sync": (20.23, 0.73, 16_070),
        "one_step": (14.0, None, 23_200),
        "partial": (13.95, 0.52, 30_700),
        "multi_version": (10.46, 0.24, 34_135),
    },
}
FITTED = ("sync", "one_step")
NODE = 8


def run(devices: int, paradigm: str, train_devices: int | None = None) -> Summary:
    """One cell row; with `train_devices`, under another split than the scenario's."""
    overrides = []
    if train_devices is not None:
        where = "paradigm.one_step.cluster" if paradigm == "one_step" else "cluster"
        overrides.append(f"{where}.train_devices={train_devices}")
    scenario = load_scenario(f"paper-{devices}", overrides)
    return simulate(scenario, ParadigmName(paradigm)).summary


def table() -> None:
    print("| devices | row | | step, min | rollout only | tokens/s | mean staleness |")
    print("|---|---|---|---|---|---|---|")
    for devices, rows in PAPER.items():
        for name, (step, share, rate) in rows.items():
            got = run(devices, name)
            kind = "fitted" if name in FITTED else "predicted"
            shown = "not given" if share is None else f"{share:.0%}"
            print(f"| {devices} | `{name}` | measured | {step:.2f} | {shown} | {rate:,} | |")
            print(
                f"| | | {kind} | {got.step_minutes:.2f} ({got.step_minutes / step - 1:+.0%}) "
                f"| {got.rollout_only_share:.0%} | {got.tokens_per_s:,.0f} "
                f"({got.tokens_per_s / rate - 1:+.0%}) | {got.mean_staleness:.2f} |",
                flush=True,
            )


def splits() -> None:
    print("| devices | row | trainer's devices | step, min | rollout only |")
    print("|---|---|---|---|---|")
    for devices in PAPER:
        for name in ("one_step", "multi_version"):
            centre = (
                load_scenario(f"paper-{devices}").setup(ParadigmName(name)).params.train_devices
            )
            for train in range(centre - NODE, centre + NODE + 1, NODE):
                got = run(devices, name, train)
                print(
                    f"| {devices} | `{name}` | {train} | {got.step_minutes:.2f} "
                    f"| {got.rollout_only_share:.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", action="store_true", help="search the splits as well")
    if parser.parse_args().splits:
        splits()
    table()
