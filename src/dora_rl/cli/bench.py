"""`dora-rl bench`: measurements, as ratios within one run."""

import json
from pathlib import Path

import click

from dora_rl.cli import _benching as benching
from dora_rl.cli._output import check_output

_ORCHESTRATOR = """\b
The world is a cheap driver in virtual time whose own cost is not counted: 4 slots on each
instance, a batch that is as large as the fleet, lognormal lengths, a report of every instance
each 10 s. Each size is warmed up until every slot is busy and two versions are live, and then
measured over whole train steps, so --events is rounded up.

\b
Examples:
  dora-rl bench orchestrator
  dora-rl bench orchestrator --instances 64,1024 --json
"""

_ENGINE = """\b
Each contestant is a process that loads once; they are asked in turn, so that the noise of the
machine hits all, and one computes at a time. Same prompts and lengths for all, temperature 1,
log-probabilities on. Prefill is the time for one token of every sequence, decode what more
tokens take beyond that. The roofline is the slower of reading the weights and the KV once a
step, and of the operations at the peak of torch.mm, both measured in the same run.

\b
hf is generate() of transformers. vllm needs its own environment: make venv-vllm, or a Python
that has vLLM in $DORA_RL_VLLM_PYTHON.

\b
Examples:
  dora-rl bench engine
  dora-rl bench engine --against hf,vllm --batches 1,8,32,64,128
  dora-rl bench engine --model tiny --batches 8 --json
"""

_MIGRATION = """\b
By KV: exported, sent to another process, imported, until the next token is there. Read again:
its tokens are submitted there, until the next token is there. Both go on as without the move,
but for rounding: the table counts the moves after which a token differed. In bfloat16 rounding
depends on how many rows are computed at once, so some do; with --dtype float32 hardly one.

\b
Examples:
  dora-rl bench migration
  dora-rl bench migration --model tiny --tokens 100,1000 --json
"""

_VERSIONS = """\b
One engine holds all versions, each with other weights. The rows of the batch are split evenly.

\b
Examples:
  dora-rl bench versions
  dora-rl bench versions --model tiny --batch 64 --versions 1,4,8 --json
"""

_TRL = """\b
Same model, questions, reward, learning rate, group size and lengths; temperature 1, no KL. Each
has every processor, one after the other, and works in its own best way, which a short search
finds: TRL's dtype and sequences in one pass; ours in turns or at once. Ours trains in float32 and
generates in the dtype of the model's files. Responses end where the model ends them, so both
numbers of tokens are shown. Warm-up is not counted. The default takes most of an hour on two
cores.

\b
TRL needs its own environment: make venv-trl, or a Python that has TRL in --trl-python.

\b
Examples:
  dora-rl bench trl
  dora-rl bench trl --steps 3 --max-tokens 64 --json
"""

_DURABILITY = """\b
The quickstart without its evaluations, with the ledger and without it, in turns. Then a rollout
process is killed, and a whole run, which is resumed. The default takes some six minutes.

\b
Examples:
  dora-rl bench durability
  dora-rl bench durability --rounds 1 --steps 8 --json
"""

_MODES = """\b
The quickstart's model and task, with long-tailed lengths, as processes of this machine. Every
paradigm runs through the same core; what differs is a row of its table. Rollout-only is the part
of a step in which nothing is trained. The search for each one's best split of the cores is
printed; then they take turns. The default takes about ten minutes on two cores.

\b
Examples:
  dora-rl bench modes
  dora-rl bench modes --paradigms sync,multi_version --rounds 1 --steps 8 --json
"""

_CONVERGENCE = """\b
sync, multi_version with K = 1 and 3, and in_flight, from the same model, with equal numbers of
trajectories. Held-out reward is that of the last version on prompts that no run trains on. The
default takes well over an hour on two cores.

\b
Examples:
  dora-rl bench convergence --out convergence.json --plot convergence.png
  dora-rl bench convergence --seeds 2 --steps 20
"""

_EXAMPLES = """\b
Examples:
  dora-rl bench orchestrator
  dora-rl bench engine --model tiny
  dora-rl bench engine --against hf,vllm --json
"""


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """Measure the orchestrator, the embedded engine and whole training."""


@command.command(epilog=_ORCHESTRATOR)
@click.option(
    "--instances",
    default="64,512,4096,8192",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of instances to measure, in one run.",
)
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=150_000,
    show_default=True,
    help="Events to measure at each size, at least.",
)
@benching.as_json
def orchestrator(instances: str, events: int, as_json: bool) -> None:
    """Events per second of the deciding core alone, on fleets of several sizes.

    Shows the cost per event, how it grows from the smallest to the largest fleet, and how
    long a full rebalance takes.
    """
    from dora_rl.benchmarks.orchestrator import check_sizes, measure

    sizes = check_sizes(benching.numbers("--instances", instances, "64,512"))
    with benching.progress() as progress:
        result = measure(sizes, events, progress)
    benching.show(result, as_json)


@command.command(epilog=_ENGINE)
@click.option(
    "--against",
    default="",
    metavar="hf,vllm",
    help="Other engines to measure in the same run.  [default: none]",
)
@click.option(
    "--batches",
    default="1,8,32,64,128",
    show_default=True,
    metavar="N,N,…",
    help="Batch sizes to measure.",
)
@benching.lengths
@benching.of_an_engine(repeats=3)
def engine(
    against: str,
    batches: str,
    prompt_tokens: int,
    new_tokens: int,
    model: str,
    repeats: int,
    threads: int | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Tokens per second of the embedded engine, against others and the machine's limits."""
    from dora_rl.benchmarks.contestants.arena import default_threads
    from dora_rl.benchmarks.engine import Plan, measure

    plan = Plan(
        model=model,
        against=benching.names(against),
        batches=benching.numbers("--batches", batches, "1,8,32"),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        threads=default_threads() if threads is None else threads,
        dtype=dtype,
    )
    with benching.children(), benching.progress() as progress:
        result = measure(plan, progress)
    benching.show(result, as_json)


@command.command(epilog=_MIGRATION)
@click.option(
    "--tokens",
    default="500,1000,2000,4000",
    show_default=True,
    metavar="N,N,…",
    help="Tokens that the trajectory has in the KV when it moves.",
)
@benching.of_an_engine(repeats=5)
def migration(
    tokens: str,
    model: str,
    repeats: int,
    threads: int | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Time to move a running trajectory: by its KV, and by reading its tokens again."""
    from dora_rl.benchmarks.contestants.arena import default_threads
    from dora_rl.benchmarks.migration import Plan, measure

    plan = Plan(
        model=model,
        tokens=benching.numbers("--tokens", tokens, "500,1000"),
        repeats=repeats,
        threads=default_threads() if threads is None else threads,
        dtype=dtype,
    )
    with benching.children(), benching.progress() as progress:
        result = measure(plan, progress)
    benching.show(result, as_json)


@command.command(epilog=_VERSIONS)
@click.option(
    "--batch", type=int, default=32, show_default=True, help="Rows of the batch, in all versions."
)
@click.option(
    "--versions",
    default="1,2,4",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of live versions to measure; 1 must be among them.",
)
@benching.lengths
@benching.of_an_engine(repeats=5)
def versions(
    batch: int,
    versions: str,
    prompt_tokens: int,
    new_tokens: int,
    model: str,
    repeats: int,
    threads: int | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Tokens per second of one engine that holds several versions at once."""
    from dora_rl.benchmarks.contestants.arena import default_threads
    from dora_rl.benchmarks.versions import Plan, measure

    plan = Plan(
        model=model,
        batch=batch,
        versions=benching.numbers("--versions", versions, "1,2,4"),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        threads=default_threads() if threads is None else threads,
        dtype=dtype,
    )
    with benching.children(), benching.progress() as progress:
        result = measure(plan, progress)
    benching.show(result, as_json)


@command.command(epilog=_TRL)
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    metavar="NAME|DIR",
    help="smollm2 (see dora-rl fetch-model), or a Hugging Face directory with a tokenizer.",
)
@click.option("--steps", type=int, default=5, show_default=True, help="Train steps to measure.")
@click.option("--prompts", type=int, default=4, show_default=True, help="Prompts of a step.")
@click.option(
    "--group-size", type=int, default=8, show_default=True, help="Responses to each prompt."
)
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Tokens of a response, at most."
)
@click.option(
    "--trl-python",
    metavar="PATH",
    help="A Python that has TRL.  [default: that of .venv-trl]",
)
@benching.as_json
def trl(
    model: str,
    steps: int,
    prompts: int,
    group_size: int,
    max_tokens: int,
    trl_python: str | None,
    as_json: bool,
) -> None:
    """Tokens per second of whole training, against GRPOTrainer of TRL."""
    from dora_rl.benchmarks.trl import Plan, measure

    plan = Plan(
        model=model,
        steps=steps,
        prompts=prompts,
        group_size=group_size,
        max_tokens=max_tokens,
        trl_python=trl_python,
    )
    with benching.children(), benching.progress() as progress:
        result = measure(plan, progress)
    benching.show(result, as_json)


@command.command(epilog=_MODES)
@click.option(
    "--paradigms",
    default="sync,one_step,partial,in_flight,multi_version",
    show_default=True,
    metavar="NAME,…",
    help="Who is measured.",
)
@click.option("--steps", type=int, default=16, show_default=True, help="Train steps of a run.")
@click.option(
    "--warmup-steps", type=int, default=4, show_default=True, help="Of them, not measured."
)
@click.option("--rounds", type=int, default=3, show_default=True, help="Runs of each paradigm.")
@click.option(
    "--search-steps", type=int, default=6, show_default=True, help="Steps of a run of the search."
)
@click.option("--max-staleness", type=int, default=3, show_default=True, help="K.")
@click.option(
    "--slots",
    default="32,64,128",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of slots, of all instances together, that the search tries.",
)
@click.option("--groups", type=int, default=64, show_default=True, help="Prompts of a step.")
@click.option(
    "--group-size", type=int, default=4, show_default=True, help="Responses to each prompt."
)
@click.option("--seed", type=int, default=0, show_default=True)
@benching.as_json
def modes(
    paradigms: str,
    steps: int,
    warmup_steps: int,
    rounds: int,
    search_steps: int,
    max_staleness: int,
    slots: str,
    groups: int,
    group_size: int,
    seed: int,
    as_json: bool,
) -> None:
    """The five paradigms as real training: throughput, rollout-only time, bubbles, staleness."""
    from dora_rl.benchmarks.modes import Plan, measure

    plan = Plan(
        paradigms=benching.paradigms(paradigms),
        steps=steps,
        warmup_steps=warmup_steps,
        rounds=rounds,
        search_steps=search_steps,
        max_staleness=max_staleness,
        slots=benching.numbers("--slots", slots, "32,64"),
        groups_per_step=groups,
        group_size=group_size,
        seed=seed,
    )
    with benching.children(), benching.progress() as progress:
        result = measure(plan, progress)
    benching.show(result, as_json)


@command.command(epilog=_DURABILITY)
@click.option("--steps", type=int, default=24, show_default=True, help="Train steps of a run.")
@click.option(
    "--warmup-steps", type=int, default=4, show_default=True, help="Of them, not measured."
)
@click.option("--rounds", type=int, default=5, show_default=True, help="Runs of each way.")
@benching.as_json
def durability(steps: int, warmup_steps: int, rounds: int, as_json: bool) -> None:
    """What it costs that nothing is lost, and how soon a run works again after a death."""
    from dora_rl.benchmarks.durability import Plan, measure

    plan = Plan(steps=steps, warmup_steps=warmup_steps, rounds=rounds)
    with benching.children(), benching.progress() as progress:
        result = measure(plan, progress)
    benching.show(result, as_json)


@command.command(epilog=_CONVERGENCE)
@click.option("--seeds", type=int, default=5, show_default=True, help="Runs of each way.")
@click.option("--steps", type=int, default=60, show_default=True, help="Train steps of a run.")
@click.option(
    "--goal", type=float, default=0.7, show_default=True, help="Reward to which time is measured."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the measurements here as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curves as PNG.")
@benching.as_json
def convergence(
    seeds: int, steps: int, goal: float, out: Path | None, plot: Path | None, as_json: bool
) -> None:
    """What staleness costs in learning: reward curves of several ways and seeds."""
    from dora_rl.benchmarks.convergence import Plan, draw, measure

    for file in (out, plot):
        if file is not None:
            check_output(file, not_these=[f for f in (out, plot) if f is not file])
    with benching.children(), benching.progress() as progress:
        result = measure(Plan(seeds=seeds, steps=steps, goal=goal), progress)
    if out is not None:
        out.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        draw(result, plot)
    benching.show(result, as_json)
