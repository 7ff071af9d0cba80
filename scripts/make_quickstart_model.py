"""Make the quickstart's model, or check the one that is shipped.

    python scripts/make_quickstart_model.py OUT       # about five minutes on one core
    python scripts/make_quickstart_model.py --check   # the shipped one, on held-out prompts

Supervised training on worked chains (`dora_rl.tasks.chains`) by a demonstrator that slips now
and then. The model so learns to add, and to slip as often: that is the room which is left for
reinforcement learning. The same seed and versions on the same machine give the same weights.
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from dora_rl.models import cpu
from dora_rl.models.tokenizer import load_tokenizer
from dora_rl.quickstart import model_directory
from dora_rl.tasks import chains
from dora_rl.transports.weights.shared_directory import WeightStore

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *chains.ALPHABET)
DATA_SEED = 1_000_003  # far from the seeds that a run would use
STEPS = 1600
LEARNING_RATE = 3e-3
WARMUP = 50
BATCH_TOKENS = 2048  # padding included
POOL = 1024  # rows that are sorted by length together
SOUND_SHARE = 0.75  # of the steps, before any slip: sums are learned sooner that way
SLIP_CHANCE = 0.35  # of a line
FIRST_SLIPPED = 10_000_000  # position of the first row that may slip, after all sound ones
SLIPS = (-10, -1, 1, 10)  # a digit off by one, as by a carry
MAX_TOKENS = 320  # the longest right response has 291
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.06,  # so small a model learns far sooner than with 0.02
    "tie_word_embeddings": True,
    "pad_token_id": VOCABULARY.index(PAD),
    "bos_token_id": VOCABULARY.index(BOS),
    "eos_token_id": VOCABULARY.index(EOS),
}


def demonstration(prompt: str, source: random.Random, slip_chance: float = SLIP_CHANCE) -> str:
    """A worked response in which a line may slip; the lines after it go on from there."""
    off, lines = 0, []
    for line in chains.solution_lines(prompt):
        if source.random() < slip_chance:
            off += source.choice(SLIPS)
        lines.append(f"{(int(line[:2]) + off) % 100:02d}{line[2:]}")
    return ",".join(lines) + "=" + lines[-1][:2]


def examples(
    source: random.Random, slip_chance: float, first: int
) -> Iterator[tuple[list[int], int]]:
    """Tokens of training prompts with their demonstrations, and the length of the prompt."""
    ids = {character: VOCABULARY.index(character) for character in chains.ALPHABET}
    for position in itertools.count(first):
        prompt = chains.row(position, DATA_SEED)["prompt"]
        text = prompt + demonstration(prompt, source, slip_chance)
        tokens = [VOCABULARY.index(BOS), *(ids[c] for c in text), VOCABULARY.index(EOS)]
        yield tokens, 1 + len(prompt)


def batches(
    seed: int, slip_chance: float, first: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, right-padded; rows of like length together. -100 is not trained.

    The rows are those of the task from position `first` on.
    """
    source = random.Random(seed)
    stream = examples(source, slip_chance, first)
    while True:
        pool = sorted((next(stream) for _ in range(POOL)), key=lambda row: len(row[0]))
        cut: list[list[tuple[list[int], int]]] = [[]]
        for row in pool:
            if (len(cut[-1]) + 1) * len(row[0]) > BATCH_TOKENS:
                cut.append([])
            cut[-1].append(row)
        source.shuffle(cut)
        for rows in cut:
            width = max(len(tokens) for tokens, _ in rows)
            inputs = torch.full((len(rows), width), VOCABULARY.index(PAD))
            targets = torch.full((len(rows), width), -100)
            for index, (tokens, start) in enumerate(rows):
                inputs[index, : len(tokens)] = torch.tensor(tokens)
                targets[index, start - 1 : len(tokens) - 1] = torch.tensor(tokens[start:])
            yield inputs, targets


def train(seed: int, steps: int, slip_chance: float) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1 - 0.97 * step / steps)
    )
    began, mean = time.perf_counter(), 0.0
    sound = int(steps * SOUND_SHARE)
    data = itertools.chain(
        itertools.islice(batches(seed, 0.0), sound),
        batches(seed + 1, slip_chance, first=FIRST_SLIPPED),
    )
    for step, (inputs, targets) in zip(range(steps), data, strict=False):
        # Right padding needs no mask: no token sees what comes after it.
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean += loss.item()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step + 1}/{steps}  loss {mean / 100:.4f}  {seconds:.0f} s", flush=True)
            mean = 0.0
    return model.eval()


def make_tokenizer() -> tokenizers.Tokenizer:
    """One token a character; a text begins with `<bos>`."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], unk_token=UNKNOWN))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNKNOWN])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    return tokenizer


def write(model: LlamaForCausalLM, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": SHAPE["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def respond(directory: Path, prompts: list[str], *, temperature: float, seed: int = 0) -> list[str]:
    """One response of the model to each prompt, the same whatever the machine's load."""
    engine = EmbeddedEngine.for_model(
        directory, EngineSettings(slots=64, version_slots=1, deterministic=True)
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    with tempfile.TemporaryDirectory() as work:
        store = WeightStore(Path(work) / "store")
        store.publish_directory(0, directory)
        engine.install(0, store.path(0))
    sampling = Sampling(temperature=temperature, max_tokens=MAX_TOKENS)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(index, 0, tuple(tokenizer.encode(prompt)), sampling, seed))
    tokens: list[list[int]] = [[] for _ in prompts]
    while not engine.idle:
        for output in engine.step():
            assert isinstance(output, Sampled), output
            tokens[output.trajectory] += output.tokens
    engine.close()
    return [tokenizer.decode(response) for response in tokens]


def check(directory: Path, count: int, seed: int = 0) -> dict[str, float]:
    """How often the model is right on held-out prompts, sampled and greedy."""
    rows = [chains.held_out(position, seed) for position in range(count)]
    prompts = [row["prompt"] for row in rows]
    found: dict[str, float] = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        responses = respond(directory, prompts, temperature=temperature, seed=seed)
        scores = [chains.reward(*pair) for pair in zip(responses, rows, strict=True)]
        found[f"{name} accuracy"] = sum(score == 1.0 for score in scores) / count
        found[f"{name} reward"] = sum(scores) / count
        lengths = [len(response) + 1 for response in responses]
        found[f"{name} mean length"] = sum(lengths) / count
        found[f"{name} longest"] = max(lengths)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, help="where to write the model directory")
    parser.add_argument("--check", action="store_true", help="only evaluate the shipped model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--slip-chance", type=float, default=SLIP_CHANCE)
    parser.add_argument("--prompts", type=int, default=500, help="how many to evaluate on")
    arguments = parser.parse_args()
    if not arguments.check and arguments.out is None:
        parser.error("name a directory to write the model to, or give --check")
    cpu.guard()
    torch.set_num_threads(1)
    directory = model_directory()
    if not arguments.check:
        directory = arguments.out
        model = train(arguments.seed, arguments.steps, arguments.slip_chance)
        if directory.exists():
            shutil.rmtree(directory)
        write(model, directory)
    for name, value in check(directory, arguments.prompts).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
