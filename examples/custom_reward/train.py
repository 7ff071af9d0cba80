"""Training from Python, with a reward that is a plain function.

    cd examples/custom_reward && python train.py

`train` returns when the run has ended. What it wrote is in a directory that `dora-rl audit` and
`dora-rl replay` read.
"""

import argparse

from short_sums import reward

import dora_rl


def main(steps: int, out: str | None, kind: str) -> dora_rl.Run:
    run = dora_rl.train(
        model="quickstart",
        prompts="sums.jsonl",
        reward=reward,
        max_staleness=2,
        steps=steps,
        out=out,
        # Any other key of the configuration, by its section.
        train={"learning_rate": 3e-4},
        rollout={"slots": 32, "max_tokens": 64},
        orchestration={"groups_per_step": 8, "group_size": 8},
        runtime={"kind": kind},
    )
    print(f"reward {run.steps[0].reward_mean:.2f} -> {run.steps[-1].reward_mean:.2f}")
    print(f"promises kept: {run.ok}; checkpoint: {run.checkpoint}")
    return run


if __name__ == "__main__":  # the local runtime starts processes, which import this file again
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="the run directory; runs/DATE-TIME if left out")
    parser.add_argument("--kind", default="local", choices=["local", "inline"])
    arguments = parser.parse_args()
    main(arguments.steps, arguments.out, arguments.kind)
