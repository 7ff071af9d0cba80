"""The packaged model: it loads everywhere, and leaves the room that the quickstart needs."""

import importlib.util
import itertools
import random
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora_rl.models.config import read_config
from dora_rl.models.tokenizer import Tokenizer, load_tokenizer
from dora_rl.quickstart import model_directory
from dora_rl.tasks import chains

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_quickstart_model.py"
NUM_PROMPTS = 200
NUM_GREEDY = 60
SAMPLED_ACCURACY = (0.35, 0.55)  # at temperature 1, before any reinforcement learning
GREEDY_ACCURACY = 0.85  # at least: it can add, and is not sure of itself


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


make = load_script()
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(model_directory())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [chains.held_out(position, 0) for position in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def sampled(rows: list[dict[str, str]]) -> list[str]:
    return make.respond(model_directory(), [row["prompt"] for row in rows], temperature=1.0)


@pytest.fixture(scope="module")
def greedy(rows: list[dict[str, str]]) -> list[str]:
    prompts = [row["prompt"] for row in rows[:NUM_GREEDY]]
    return make.respond(model_directory(), prompts, temperature=0.0)


def test_the_directory_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in model_directory().iterdir()}
    assert set(files) == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert sum(files.values()) < 6 << 20


def test_the_configuration_suits_the_task() -> None:
    config = read_config(model_directory())
    longest = chains.solution("99+99*99=")
    assert config.context >= len("<99+99*99=") + len(longest) + 1
    assert config.tied and config.dtype == "float32"
    assert config.eos_token_ids == (make.VOCABULARY.index(make.EOS),)
    assert config.vocab_size == len(make.VOCABULARY)


def test_every_character_is_one_token(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(model_directory())
    bos = make.VOCABULARY.index(make.BOS)
    for position in range(20):
        prompt = chains.row(position, 0)["prompt"]
        tokens = tokenizer.encode(prompt)
        assert tokens == theirs(prompt)["input_ids"]
        assert tokens[0] == bos and len(tokens) == 1 + len(prompt)
        assert tokenizer.decode(tokens) == prompt == theirs.decode(tokens[1:])
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (make.BOS, make.EOS, make.PAD)
    assert tokenizer.encode("7x", add_special_tokens=False) == [
        make.VOCABULARY.index("7"),
        make.VOCABULARY.index(make.UNKNOWN),
    ]


def test_transformers_and_the_engine_agree(
    rows: list[dict[str, str]], greedy: list[str], tokenizer: Tokenizer
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_directory())
    assert 500_000 <= model.num_parameters() <= 2_000_000
    for row, response in list(zip(rows, greedy, strict=False))[:10]:
        prompt = torch.tensor([tokenizer.encode(row["prompt"])])
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=320, do_sample=False
        )
        assert tokenizer.decode(text[0, prompt.shape[1] :].tolist()) == response


@pytest.mark.slow
def test_there_is_room_to_learn(
    rows: list[dict[str, str]], sampled: list[str], greedy: list[str]
) -> None:
    def accuracy(responses: list[str]) -> float:
        return statistics.mean(
            chains.reward(*pair) == 1.0 for pair in zip(responses, rows, strict=False)
        )

    assert SAMPLED_ACCURACY[0] <= accuracy(sampled) <= SAMPLED_ACCURACY[1]
    assert accuracy(greedy) >= GREEDY_ACCURACY


@pytest.mark.slow
def test_lengths_of_responses_follow_the_prompts(
    rows: list[dict[str, str]], sampled: list[str]
) -> None:
    right = [len(chains.solution(row["prompt"])) for row in rows]
    as_long = sum(length == len(response) for length, response in zip(right, sampled, strict=True))
    assert as_long >= 0.95 * NUM_PROMPTS
    lengths = [len(response) + 1 for response in sampled]
    assert max(lengths) >= 10 * statistics.mean(lengths)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1))
def test_a_demonstration_is_a_solution_but_for_slips(
    position: int, seed: int, slip_chance: float
) -> None:
    prompt = chains.row(position, 0)["prompt"]
    right = chains.solution(prompt)
    assert make.demonstration(prompt, random.Random(seed), 0.0) == right
    shown = make.demonstration(prompt, random.Random(seed), slip_chance)
    assert len(shown) == len(right)
    assert shown[-2:] == shown[-8:-6]  # the answer is the last value, right or not
    off = [
        (int(a[:2]) - int(b[:2])) % 100 if a[2:5] == b[2:5] else None
        for a, b in zip(shown[:-3].split(","), right[:-3].split(","), strict=True)
    ]
    allowed = {0, *(slip % 100 for slip in make.SLIPS)}
    for before, after in itertools.pairwise([0, *off]):
        assert before is not None and after is not None
        assert (after - before) % 100 in allowed


@pytest.mark.parametrize("slip_chance", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_was_taught_the_task_and_nothing_held_out(seed: int, slip_chance: float) -> None:
    words = dict(enumerate(make.VOCABULARY))
    held_sums = {chains.held_out(position, 0)["prompt"][:5] for position in range(2000)}
    for inputs, targets in itertools.islice(make.batches(seed, slip_chance), 3):
        assert inputs.numel() <= make.BATCH_TOKENS
        for tokens, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
            end = tokens.index(make.VOCABULARY.index(make.EOS))
            text = "".join(words[token] for token in tokens[1:end])
            prompt = text[:9]
            assert tokens[0] == make.VOCABULARY.index(make.BOS)
            assert prompt[:5] not in held_sums
            assert len(text[9:]) == len(chains.solution(prompt))
            assert slip_chance > 0 or text[9:] == chains.solution(prompt)
            # Each position is taught the token after it, from the end of the prompt on.
            assert wanted[:9] == [-100] * 9
            assert wanted[9:end] == tokens[10 : end + 1]
            assert wanted[end:] == [-100] * (len(tokens) - end)
