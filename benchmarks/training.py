"""One train step by torch's operations and by our kernels, in turns: rates, and share of the peak.

Each in a process of its own; the latter keeps the memory that it frees, as a trainer of a run does.

    python benchmarks/training.py                                    # the quickstart's model
    python benchmarks/training.py --model smollm2 --dtype bfloat16 --threads 2

Both take the same batches with the same settings. Work is counted as the products of the rows that
a way computes (a prompt that siblings share counts once where it is computed once), forward and
twice as much backward; the peak is that of torch.mm on the same threads, in the same numbers.
`--json` prints all of it.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.benchmarks.limits import measure_peaks
from dora_rl.core.protocol.types import Segment
from dora_rl.machine.heap import heap_reuse
from dora_rl.models import packaged
from dora_rl.quickstart import model_directory
from dora_rl.samples import Sample, Trajectory
from dora_rl.trainer.settings import TrainSettings
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore

# Groups, siblings, tokens of a prompt (least, most), mean and most of a response.
SIZES = {"quickstart": (16, 8, (10, 10), 23, 291), "smollm2": (2, 8, (60, 100), 60, 240)}
SPREAD = 0.8  # of the logarithm of a length


@dataclass
class Way:
    """One of the two, and what it took for each batch."""

    name: str
    native: bool
    wall_s: list[float] = field(default_factory=list)
    core_s: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)


def batch(model: str, step: int, vocab_size: int) -> tuple[Sample, ...]:
    """Siblings with lognormal lengths, as a function of the step."""
    draw = random.Random(step)
    groups, siblings, prompts, mean, most = SIZES[model]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(count))

    samples = []
    for group in range(groups):
        prompt = tokens(draw.randint(*prompts))
        for sibling in range(siblings):
            length = draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
            response = tokens(min(most, max(2, round(length))))
            trajectory = Trajectory(
                id=group * siblings + sibling,
                group=group,
                version=step,
                prompt=prompt,
                tokens=response,
                logprobs=(-math.log(vocab_size),) * len(response),
                segments=(Segment(step, "digest", len(response)),),
                truncated=False,
            )
            samples.append(Sample(trajectory=trajectory, reward=float(draw.random() < 0.5)))
    return tuple(samples)


def flops(trainer: Trainer, samples: tuple[Sample, ...], *, shared: bool) -> float:
    """Of the products that a step needs: two for each weight and row, and as many for gradients."""
    policy = trainer._replica.policy
    head = policy.model.get_output_embeddings().weight.numel()
    embedding = policy.model.get_input_embeddings().weight
    layers = sum(p.numel() for p in policy.parameters() if p.dim() > 1 and p is not embedding)
    trajectories = [sample.trajectory for sample in samples]
    prompts = [t.prompt for t in trajectories]
    rows = sum(map(len, set(prompts) if shared else prompts))
    rows += sum(len(t.tokens) - 1 for t in trajectories)
    tied = policy.model.get_output_embeddings().weight is embedding
    body = layers if tied else layers - head
    return 6.0 * (rows * body + head * sum(len(t.tokens) for t in trajectories))


class Contestant:
    """One way, in a process of its own: what the C library does with freed memory is its own."""

    trainer: Trainer

    @classmethod
    def open(cls, options: argparse.Namespace, native: bool) -> None:
        if native:
            heap_reuse()
        quickstart = options.model == "quickstart"
        cls.trainer = Trainer.open(
            model_directory() if quickstart else packaged.find(options.model),
            WeightStore(Path(tempfile.mkdtemp(dir=options.work))),
            TrainSettings(
                learning_rate=1e-6,
                dtype=options.dtype,
                threads=options.threads,
                native_kernels=native,
            ),
            AlgorithmSettings(preset="grpo"),
            max_tokens=512,
            temperature=1.0,
            total_steps=0,
            seed=0,
        )

    @classmethod
    def step(cls, options: argparse.Namespace, step: int, native: bool) -> tuple[float, ...]:
        """Wall and core seconds, operations and tokens of one step."""
        samples = batch(options.model, step, cls.trainer._replica.vocab_size)
        wall, cores = time.perf_counter(), time.process_time()
        report = cls.trainer.train(step, samples)
        wall, cores = time.perf_counter() - wall, time.process_time() - cores
        return wall, cores, flops(cls.trainer, samples, shared=native), report.sampled_tokens


def peak_of(options: argparse.Namespace) -> float:
    torch.set_num_threads(options.threads)
    return measure_peaks(budget_s=4.0)[options.dtype]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    ways, tokens = [Way("torch", False), Way("kernels", True)], []
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in a worker of a run
    spawn = get_context("spawn")
    with ExitStack() as stack:
        options.work = stack.enter_context(tempfile.TemporaryDirectory())
        processes = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in (*ways, "peak")]
        for way, process in zip(ways, processes, strict=False):
            process.submit(Contestant.open, options, way.native).result()
        peak = processes[-1].submit(peak_of, options).result()
        turns = list(zip(ways, processes, strict=False))
        for step in range(options.repeats + 1):
            for way, process in turns if step % 2 else reversed(turns):
                found = process.submit(Contestant.step, options, step, way.native).result()
                if step:  # the first is a warm-up
                    way.wall_s.append(found[0])
                    way.core_s.append(found[1])
                    way.flops.append(found[2])
            if step:
                tokens.append(found[3])
    return {
        **{name: value for name, value in vars(options).items() if name != "work"},
        "mm_gflops": peak / 1e9,
        "tokens": tokens,
        "ways": {way.name: rates(way, tokens, peak) for way in ways},
        "speedup_wall": median(a / b for a, b in zip(*(w.wall_s for w in ways), strict=True)),
        "speedup_cores": median(a / b for a, b in zip(*(w.core_s for w in ways), strict=True)),
    }


def rates(way: Way, tokens: list[float], peak: float) -> dict[str, float]:
    """Of the median step; those by core are what one thread would reach undisturbed."""
    by_wall = median(f / s for f, s in zip(way.flops, way.wall_s, strict=True))
    by_core = median(f / s for f, s in zip(way.flops, way.core_s, strict=True))
    return {
        "step_s": median(way.wall_s),
        "core_s": median(way.core_s),
        "trained_tokens_per_s": median(n / s for n, s in zip(tokens, way.wall_s, strict=True)),
        "gflops": by_wall / 1e9,
        "share_of_peak": by_wall / peak,
        "gflops_by_core": by_core / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SIZES), default="quickstart")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measured(options)
    if found["json"]:
        print(json.dumps(found, indent=2))
        return
    print(f"torch.mm {found['mm_gflops']:.0f} GFLOP/s, {median(found['tokens']):.0f} tokens a step")
    for name, way in found["ways"].items():
        print(
            f"{name:8} {way['step_s']:.3f} s ({way['core_s']:.3f} of cores), "
            f"{way['trained_tokens_per_s']:.0f} tokens/s, {way['gflops']:.0f} GFLOP/s, "
            f"{way['share_of_peak']:.0%} of the peak"
        )
    print(f"{found['speedup_wall']:.2f} x by time, {found['speedup_cores']:.2f} x by core time")


if __name__ == "__main__":
    main()
