"""Training against TRL: what is asked of both, what is counted, and what is refused."""

import ast
import json
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dora_rl
from dora_rl import cli
from dora_rl.benchmarks import training, trl
from dora_rl.benchmarks.contestants import process, trl_process, trl_runs
from dora_rl.benchmarks.contestants.process import Contestant, ContestantFailed
from dora_rl.benchmarks.contestants.trl_runs import (
    Choice,
    OurRuns,
    Split,
    Trained,
    TrlRuns,
    Work,
    questions,
)
from dora_rl.benchmarks.models import open_model
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.trl import Plan, Result, Side
from dora_rl.core.protocol.errors import UserError
from dora_rl.quickstart import model_directory
from tests.benchmarks import stubs

MODEL = str(model_directory())
FILE = Path(trl_process.__file__)
# TRL as a process without TRL: a step of `cost` seconds, twice that in the warm-up.
STUB = """
class Stub:
    def __init__(self, **settings):
        self.cost = {"float32": 4.0, "mixed": 2.0, "bfloat16": 3.0}

    def about(self):
        return {"version": "9.9"}

    def train(self, questions, num_steps, batch, dtype, per_device, max_tokens, **rest):
        cost = self.cost[dtype] + abs(per_device - 4) / 10
        return {
            "step_s": [2 * cost] * (num_steps > 1) + [cost] * (num_steps - (num_steps > 1)),
            "tokens": [7] * (num_steps > 1) + [batch * max_tokens] * (num_steps - (num_steps > 1)),
            "completions": [batch] * num_steps,
            "rewards": [0.0] * num_steps,
            "prompts": [[ord(c) for c in question] for question in questions],
        }


def load(**settings):
    return Stub(**settings)
"""


def letters(question: str) -> list[int]:
    return [ord(character) for character in question]


def plan(**given: Any) -> Plan:
    return Plan(**{"model": MODEL, "steps": 3, "prompts": 2, "group_size": 4, **given})


def work(max_tokens: int = 16) -> Work:
    return Work(prompts=2, group_size=4, max_tokens=max_tokens)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Contestant]:
    with Contestant(stubs.start(tmp_path, "trl", STUB), tmp_path) as started:
        started.load()
        yield started


# What is asked


@given(st.integers(0, 40), st.integers(0, 40))
def test_questions_are_one_list_of_which_everyone_reads_the_beginning(a: int, b: int) -> None:
    short, long = sorted((a, b))
    assert questions(long)[:short] == questions(short)


def test_questions_differ() -> None:
    assert len(set(questions(200))) > 190


@given(st.integers(1, 64))
def test_a_split_uses_the_cores_it_is_given(cores: int) -> None:
    ways = trl.splits(cores)
    assert len(ways) == len(set(ways)) >= 3
    for way in ways:
        assert 1 <= way.rollout_threads <= cores and 1 <= way.train_threads <= cores
    assert any(way.max_staleness == 0 for way in ways)
    if cores > 1:
        assert any(way.rollout_threads + way.train_threads == cores for way in ways)


@given(st.sampled_from(["sync", "multi_version"]), st.integers(0, 3), st.integers(1, 9))
def test_a_run_ahead_is_as_far_ahead_at_the_end_as_at_the_beginning(
    paradigm: str, staleness: int, steps: int
) -> None:
    """What is generated for later steps while the measured ones run pays for what was there."""
    way = Split(paradigm, staleness, 1, 1)
    assert way.warmup > staleness and way.tail == staleness


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "--steps must be >= 1: `0`"),
        ({"prompts": 0}, "--prompts must be >= 1: `0`"),
        ({"group_size": 1}, "--group-size must be >= 2: `1`"),
        ({"max_tokens": 0}, "--max-tokens must be >= 1: `0`"),
        ({"search_steps": -1}, "--search-steps must be >= 0: `-1`"),
        ({"model": "tiny"}, "`tiny` has no tokenizer"),
        ({"model": "nowhere"}, "no such model: `nowhere`"),
    ],
)
def test_a_plan_refuses_what_cannot_be_measured(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**given)


def test_the_python_of_trl_is_the_named_one_or_that_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trl.trl_python(sys.executable) == Path(sys.executable)
    with pytest.raises(UserError, match=r"--trl-python is not a program: `.*none`"):
        trl.trl_python(str(tmp_path / "none"))
    monkeypatch.setattr(dora_rl, "__file__", str(tmp_path / "src" / "dora_rl" / "x.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(UserError, match=r"Run: make venv-trl"):
        trl.trl_python()
    python = tmp_path / ".venv-trl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert trl.trl_python() == python


# TRL's side


def test_trl_takes_its_best_way_and_warm_up_is_not_counted(child: Contestant) -> None:
    side = Side()
    trl._measure_trl(TrlRuns(work(max_tokens=5), child, letters, Reporter()), plan(), side)
    # bfloat16 and float32 are slower; then 4 sequences beat 8, as the stub has it.
    assert [way for way, _ in side.tried] == [
        *(Choice(dtype, 8) for dtype in trl_process.DTYPES),
        Choice("mixed", 4),
    ]
    assert side.best == Choice("mixed", 4)
    assert side.trained == Trained([2.0] * 3, [40] * 3)


@given(st.integers(1, 128))
def test_sizes_of_a_pass_divide_the_batch(batch: int) -> None:
    class Fake:
        work = types.SimpleNamespace(batch=batch)

        def train(self, way: Choice, steps: int, warmup: int) -> Trained:
            assert batch % way.per_device == 0
            return Trained([1.0], [way.per_device])

    side = Side()
    trl._measure_trl(Fake(), plan(steps=1), side)  # type: ignore[arg-type]
    ways = [way for way, _ in side.tried if isinstance(way, Choice)]
    assert len(side.tried) == len(ways) == len(set(ways))
    assert {way.dtype for way in ways} == set(trl_process.DTYPES)
    assert isinstance(side.best, Choice)
    assert side.best.per_device == max(way.per_device for way in ways)


def test_trl_that_reads_other_prompts_is_not_compared_with(child: Contestant) -> None:
    run = TrlRuns(work(), child, lambda question: [1], Reporter())
    with pytest.raises(ContestantFailed, match="reads other tokens"):
        run.train(Choice("mixed", 4), 1, 0)


def test_trl_that_trains_another_batch_is_not_compared_with(tmp_path: Path) -> None:
    code = STUB.replace("[batch] * num_steps", "[batch - 1] * num_steps")
    with Contestant(stubs.start(tmp_path, "trl", code), tmp_path) as child:
        child.load()
        run = TrlRuns(work(), child, letters, Reporter())
        with pytest.raises(ContestantFailed, match=r"trained \[7\] completions"):
            run.train(Choice("mixed", 4), 1, 0)


# What runs in TRL's environment


def test_the_process_of_trl_imports_the_standard_library_alone_until_it_is_loaded() -> None:
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    top = {
        alias.name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert top <= sys.stdlib_module_names
    everywhere = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not any(str(name).startswith("dora_rl") for name in everywhere)


@given(st.text())
def test_the_reward_is_a_share(text: str) -> None:
    assert 0 <= trl_process.reward(text) <= 1


def test_the_reward_of_an_example() -> None:
    assert trl_process.reward("") == 0
    assert trl_process.reward("a1b2") == 0.5


def test_steps_count_what_trl_hands_to_its_reward_function() -> None:
    steps = trl_process._Steps()
    chat = [[{"role": "assistant", "content": "42"}], [{"role": "assistant", "content": "no"}]]
    assert steps.score(chat, [[5, 6, 2], [7]], prompts=[], trainer_state=None) == [1.0, 0.0]
    assert steps.score(["4x"], [[1, 2]]) == [0.5]
    assert (steps.tokens, steps.completions, steps.rewards) == ([4, 2], [2, 1], [0.5, 0.5])
    steps.ends = [1.0, 3.0, 3.5]
    assert steps.spans() == [(1.0, 3.0), (3.0, 3.5)]


class Given:
    """Stands for a class of TRL: keeps what it was given."""

    def __init__(self, **given: Any) -> None:
        self.given = given


@pytest.mark.parametrize("dtype", trl_process.DTYPES)
@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_trl_is_told_what_was_agreed(
    dtype: str, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = types.ModuleType("trl")
    library.GRPOConfig = library.GRPOTrainer = Given
    datasets: Any = types.ModuleType("datasets")
    datasets.Dataset = types.SimpleNamespace(from_list=list)
    monkeypatch.setitem(sys.modules, "trl", library)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(trl_process, "_clock", lambda steps: "a clock")
    side = trl_process.Trl.__new__(trl_process.Trl)
    side._directory, side._work = "model", "work"
    side._tokenizer = types.SimpleNamespace(chat_template=template)
    trainer = side._trainer(
        ["How many?"],
        trl_process._Steps(),
        num_steps=3,
        group_size=4,
        batch=32,
        per_device=8,
        max_tokens=16,
        learning_rate=1e-6,
        dtype=dtype,
        seed=0,
    )
    prompt = trainer.given["train_dataset"][0]["prompt"]
    chat = [{"role": "user", "content": "How many?"}]
    assert prompt == ("How many?" if template is None else chat)
    config = trainer.given["args"].given
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 32
    wanted = {
        "num_generations": 4,
        "max_completion_length": 16,
        "temperature": 1.0,
        "beta": 0.0,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "max_steps": 3,
        "bf16": dtype == "mixed",
    }
    assert {key: config[key] for key in wanted} == wanted
    weights = "bfloat16" if dtype == "bfloat16" else "float32"
    assert config["model_init_kwargs"]["dtype"] == weights


# Our side


def record(step: int, trajectories: int = 8) -> Any:
    """Step n takes n seconds, and trains 10 n tokens."""
    return types.SimpleNamespace(
        step=step, step_s=float(step), tokens=10 * step, trajectories=trajectories
    )


@given(st.integers(0, 3), st.integers(1, 6))
def test_only_what_is_between_warm_up_and_tail_is_measured(staleness: int, steps: int) -> None:
    way = Split("multi_version", staleness, 1, 1)
    records = [record(step) for step in range(way.warmup + steps + way.tail)]
    measured = range(way.warmup, way.warmup + steps)
    trained = trl_runs._measured(way, steps, 8, records)
    assert trained == Trained([float(s) for s in measured], [10 * s for s in measured])
    assert trained.tokens_per_s == pytest.approx(10)
    with pytest.raises(ContestantFailed, match="trained"):
        trl_runs._measured(way, steps, 9, records)
    with pytest.raises(ContestantFailed, match="trained"):
        trl_runs._measured(way, steps, 8, records[:-1])


@pytest.fixture
def ours(tmp_path: Path) -> OurRuns:
    return OurRuns(work(), model_directory(), tmp_path, Reporter())


def fake_run(monkeypatch: pytest.MonkeyPatch, plans: list[Any], **ending: Any) -> None:
    """Runs that only say how they were planned, and end at once."""

    def execute(planned: Any, **told: Any) -> Any:
        if "before" in ending:
            with pytest.raises((ContestantFailed, ValueError)):  # its pipe is closed
                ending["before"]()
        plans.append(planned)
        planned.out.mkdir()
        return types.SimpleNamespace(
            ok=ending.get("ok", True) and ending.get("audit", True),
            ending=types.SimpleNamespace(
                ok=ending.get("ok", True),
                reason="the disk is full",
                interrupted=ending.get("interrupted", False),
            ),
            steps=[record(step) for step in range(planned.config.run.steps)],
        )

    monkeypatch.setattr(training, "execute", execute)


def test_ours_is_told_what_was_agreed(ours: OurRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    fake_run(monkeypatch, plans)
    ways = [Split("sync", 0, 2, 2), Split("multi_version", 2, 1, 1)]
    for way in ways:
        assert len(ours.train(way, 3).step_s) == 3
    for way, planned in zip(ways, plans, strict=True):
        config = planned.config
        core = config.settings()
        assert (core.paradigm, core.groups_per_step, core.group_size) == (way.paradigm, 2, 4)
        assert config.threads() == (way.rollout_threads, way.train_threads)
        assert config.run.steps == way.warmup + 3 + way.tail
        assert config.rollout.temperature == 1.0 and config.rollout.max_tokens == 16
        assert config.train.learning_rate == trl_runs.LEARNING_RATE
        assert config.algorithm.kl == "none" and not config.algorithm.dynamic_sampling
        read = [prompt.text for prompt in planned.task.stream.read(0, 6)]
        assert read == questions(6)
        assert planned.task.rewards[0].function == f"{trl_process.__name__}:reward"
        assert not planned.out.exists()  # nothing is left of a run


def test_a_run_of_ours_that_fails_ends_the_measurement(
    ours: OurRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(monkeypatch, [], ok=False)
    with pytest.raises(ContestantFailed, match="the disk is full"):
        ours.train(Split("sync", 0, 1, 1), 1)
    fake_run(monkeypatch, [], audit=False)
    with pytest.raises(ContestantFailed, match="broken promise"):
        ours.train(Split("sync", 0, 1, 1), 1)
    fake_run(monkeypatch, [], interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        ours.train(Split("sync", 0, 1, 1), 1)


def test_ours_takes_its_fastest_way(ours: OurRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = trl.splits(2)
    rates = {way: [40, 10, 50, 20][place] for place, way in enumerate(ways)}
    monkeypatch.setattr(
        ours, "train", lambda way, steps: Trained([1.0] * steps, [rates[way]] * steps)
    )
    side = Side()
    trl._measure_ours(ours, ways, plan(), side)
    assert side.best == ways[2]
    assert side.trained == Trained([1.0] * 3, [50] * 3)
    assert dict(side.tried) == rates


# Both


def test_ours_runs_when_trl_is_gone_and_both_are_asked_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Contestant] = []
    plans: list[Any] = []
    start_all = process.start_all

    def start(*given: Any) -> Any:
        children.extend(start_all(*given))
        return children

    monkeypatch.setattr(trl, "_start", lambda *given: stubs.start(tmp_path, "trl", STUB))
    monkeypatch.setattr(trl, "start_all", start)
    monkeypatch.setattr(OurRuns, "encode", lambda self, question: letters(question))
    monkeypatch.setattr(trl, "cores", lambda: 2)
    fake_run(monkeypatch, plans, before=lambda: children[0].ask("about"))
    result = trl.measure(plan(max_tokens=5, trl_python=sys.executable))
    assert result.trl.trained == Trained([2.0] * 3, [40] * 3)
    # Of the fake runs all are as fast, so the first way is taken; its warm-up is one step.
    assert result.ours.trained == Trained([1.0, 2.0, 3.0], [10, 20, 30])
    assert result.ratio == pytest.approx(10 / 20)
    assert len(plans) == len(trl.splits(2)) + 1
    assert result.to_json()["ours"]["searched"][0]["paradigm"] == "sync"


class InProcess:
    """The stub without a process of its own."""

    def __init__(self) -> None:
        made: dict[str, Any] = {}
        exec(STUB, made)
        self._stub = made["load"]()

    def ask(self, request: str) -> Any:
        return getattr(self._stub, request)()

    def send(self, request: str, **given: Any) -> None:
        self._answer = getattr(self._stub, request)(**given)

    def receive(self, timeout_s: float) -> Any:
        return self._answer


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Both sides as fakes; the plans of our runs."""
    plans: list[Any] = []
    monkeypatch.setattr(trl, "start_all", lambda *given: [InProcess()])
    monkeypatch.setattr(OurRuns, "encode", lambda self, question: letters(question))
    monkeypatch.setattr(trl, "cores", lambda: 2)
    fake_run(monkeypatch, plans)
    return plans


def test_what_was_measured_can_be_shown_at_any_moment(in_process: list[Any]) -> None:
    asked = plan(max_tokens=5, trl_python=sys.executable)
    shown = [r.to_json() for r in stubs.interrupted_everywhere(partial(trl.measure, asked))]
    assert len(shown[0]["trl"]["searched"]) == 1 and "tokens_per_s" not in shown[0]["trl"]
    assert shown[-1]["trl"]["tokens_per_s"] == 20.0 and shown[-1]["ratio"] is None
    assert len(shown[-1]["ours"]["searched"]) == len(trl.splits(2))


def test_without_a_search_each_side_takes_its_first_way(in_process: list[Any]) -> None:
    result = trl.measure(plan(max_tokens=5, trl_python=sys.executable, search_steps=0))
    assert (result.trl.best, result.ours.best) == (Choice("float32", 8), trl.splits(2)[0])
    assert result.trl.tried == result.ours.tried == [] and len(in_process) == 1
    assert not any("Searched" in line for line in result.summary())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 1024}, "the prompts and --max-tokens make sequences of"),
        ({"trl_python": "/nowhere"}, "--trl-python is not a program: `/nowhere`"),
    ],
)
def test_nothing_is_started_for_what_cannot_be_run(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "start_all", None)
    with pytest.raises(UserError, match=message):
        trl.measure(plan(**{"trl_python": sys.executable, **given}))


def test_what_is_wrong_with_ours_is_said_before_trl_takes_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: OurRuns, way: Split, steps: int) -> None:
        raise UserError("no such reward")

    monkeypatch.setattr(trl, "start_all", None)
    monkeypatch.setattr(OurRuns, "prepare", refuse)
    with pytest.raises(UserError, match="no such reward"):
        trl.measure(plan(trl_python=sys.executable))


# The command


def test_the_command_shows_both_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Plan] = []

    def measure(asked: Plan, reporter: Reporter) -> Result:
        seen.append(asked)
        way, choice = Split("multi_version", 1, 1, 1), Choice("mixed", 4)
        return Result(
            asked,
            open_model(MODEL, None, tmp_path),
            2,
            "9.9",
            Side(Trained([10.0, 10.0], [300, 500]), choice, [(choice, 41.0)]),
            Side(Trained([2.0, 3.0], [500, 600]), way, [(way, 199.0)]),
            ["a note"],
        )

    monkeypatch.setattr(trl, "measure", measure)
    args = ["bench", "trl", "--model", MODEL, "--steps", "2", "--trl-python", "there"]
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert "Ratio 5.50 (goal 5), TRL 9.9." in out
    assert "multi_version K=1, 1 rollout + 1 train threads: 199.0" in out
    assert cli.main([*args, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ratio"] == pytest.approx(5.5)
    for name, rate, step_s, tokens in (("trl", 40.0, 10.0, 800), ("ours", 220.0, 2.5, 1100)):
        side = shown[name]
        assert (side["tokens_per_s"], side["step_s"]) == (rate, step_s)
        assert (side["tokens"], side["steps"]) == (tokens, 2)
        assert "dtype" in side and side["searched"]
    assert seen[0] == Plan(model=MODEL, steps=2, trl_python="there")


def test_the_defaults_of_the_command_are_those_of_the_plan() -> None:
    from dora_rl.cli.bench import command

    other = ("as_json", "quick", "trl_python", "log_level")
    options = {o.name: o.default for o in command.commands["trl"].params if o.name not in other}
    assert len(options) == 6
    assert {name: getattr(Plan(), str(name)) for name in options} == options


def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["bench", "trl", "--model", MODEL, "--trl-python", str(tmp_path / "none")]
    assert cli.main(args) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
