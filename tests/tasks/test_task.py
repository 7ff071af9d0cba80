"""A task as a whole: from settings or objects to prompts, tokens, scores and environments."""

import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import dump_toml, validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.samples import Trajectory
from dora_rl.sandbox import linux
from dora_rl.sandbox.errors import LoadError
from dora_rl.sandbox.objects import import_object, name_of
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.fingerprints import UNREADABLE
from dora_rl.tasks.settings import RewardSettings, TaskSettings
from dora_rl.tasks.sources import Gym
from dora_rl.tasks.task import Task, reward_functions
from tests.isolation import skip_weaker
from tests.patience import PATIENCE_S
from tests.tasks import samples
from tests.tasks.models import make_directory

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)]
TRAJECTORY = Trajectory(
    id=3,
    group=1,
    version=0,
    prompt=(1,),
    tokens=(2, 3),
    logprobs=(-0.5, -0.25),
    segments=(),
    truncated=False,
)


def open_task(model: Path | None = None, *, seed: int = 0, **how: Any) -> Task:
    objects = {key: how.pop(key) for key in ("reward", "prompts", "environment") if key in how}
    return Task.open(
        TaskSettings(reward_workers=1, **how), model_directory=model, seed=seed, **objects
    )


def test_a_task_of_names(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = validate(
        TaskSettings,
        {
            "prompts": str(path),
            "eval_prompts": "tests.tasks.samples:at",
            "eval_size": 5,
            "eval_every": 10,
            "reward_workers": 1,
            "reward": [
                {"name": "exact"},
                {"function": "tests.tasks.samples:length", "weight": 0.5},
                {
                    "name": "near",
                    "function": "dora_rl.tasks.rewards:numeric",
                    "options": {"tolerance": 2.0},
                },
            ],
        },
        "config.toml",
    )
    model = make_directory(tmp_path / "model")
    task = Task.open(settings, model_directory=model, seed=1)
    assert task.eval_stream is not None and len(task.eval_stream.read(0, 99)) == 5
    (prompt,) = task.stream.read(0, 1)
    assert task.encoder.decode(task.encoder.encode(prompt)) == f"user\n{prompt.text}\nassistant\n"
    with task.score_pool() as pool:
        outcome = pool.run(task.job(prompt, str(prompt.answer)))
    assert outcome.parts == {"exact": 1.0, "length": 1.0, "near": 1.0}
    assert outcome.reward == 2.5


def test_a_task_of_objects() -> None:
    def reward(response: str, example: dict[str, Any], trajectory: dict[str, Any]) -> float:
        return float(response == example["answer"]) + sum(trajectory["logprobs"])

    task = open_task(prompts=ROWS, reward=reward)
    (prompt,) = task.stream.read(2, 1)
    with task.score_pool() as pool:
        outcome = pool.run(task.job(prompt, prompt.answer, TRAJECTORY))
    assert outcome.reward == 0.25
    assert outcome.parts == {"reward": 0.25}
    with pytest.raises(TaskError, match=r"has no model"):
        task.encoder  # noqa: B018
    with pytest.raises(TaskError, match=r"task.environment is missing"):
        task.environment_pool()


def test_a_task_with_an_environment() -> None:
    task = open_task(prompts=ROWS, environment=samples.Count)
    assert task.has_environment
    with task.environment_pool() as pool:
        pool.open(1, {"n": 2})
        assert pool.poll(PATIENCE_S)[0].observation == "count to 2"
    with pytest.raises(TaskError, match=r"the rewards are the environment's"):
        task.score_pool()


def test_what_is_missing_is_said() -> None:
    with pytest.raises(TaskError, match=r"task.reward is missing"):
        open_task(prompts=ROWS)
    with pytest.raises(TaskError, match=r"task.prompts is missing"):
        open_task(reward="exact")
    with pytest.raises(TaskError, match=r"task.reward has two of one name: `exact`"):
        open_task(prompts=ROWS, reward=["exact", "exact"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"reward": [{"weight": 1.0}]}, "reward.0.function is missing. Give `name`"),
        ({"eval_every": 5}, "eval_every needs eval_prompts: `5`"),
        ({"reward_timeout_s": 0}, "reward_timeout_s must be > 0"),
        ({"reward_memory_mb": 1}, "reward_memory_mb must be >= 16"),
        ({"writable": "scores"}, "writable must be"),
        ({"chat": "yes"}, "chat must be one of"),
        ({"epochs": 0}, "epochs must be >= 1"),
        ({"reward_timeout": 1.0}, "Did you mean `reward_timeout_s`"),
        ({"reward": [{"name": "exact", "wait": 1.0}]}, "unknown key: `reward.0.wait`"),
    ],
)
def test_settings_that_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(TaskSettings, data, "config.toml")


def test_settings_are_written_and_read_back() -> None:
    import tomllib

    settings = TaskSettings(
        prompts="gym:leg_counting",
        options={"size": 5, "nested": {"a": [1]}},
        reward=(RewardSettings(name="gym", weight=0.5),),
        writable=("scores", "/tmp/scores"),
    )
    for whole in (settings, TaskSettings(), TaskSettings(reward="exact")):
        assert validate(TaskSettings, tomllib.loads(dump_toml(whole)), "x") == whole


def test_a_reward_writes_where_it_is_allowed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name that means another directory to a worker, which has one of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("kept", "other"):
        (tmp_path / name).mkdir()

    def write(response: str) -> float:
        (tmp_path / response / "note").write_text("x")
        return 1.0

    def play(task: Task, directory: str) -> str | None:
        with task.environment_pool() as pool:
            pool.open(1, {"directory": str(tmp_path / directory)})
            return pool.poll(PATIENCE_S)[0].failure

    tasks = [
        open_task(prompts=ROWS, reward=write, writable=("kept",)),
        open_task(prompts=ROWS, environment=samples.Writer, writable=("kept",)),
    ]
    with tasks[0].score_pool() as pool:
        if pool.isolation.writes != "scratch":
            skip_weaker("no Landlock")
        (prompt,) = tasks[0].stream.read(0, 1)
        assert pool.run(tasks[0].job(prompt, "kept")).reward == 1.0
        refused = ("PermissionError", "Read-only file system")
        failure = str(pool.run(tasks[0].job(prompt, "other")).failure)
        assert any(words in failure for words in refused), failure
    assert play(tasks[1], "kept") is None
    failure = str(play(tasks[1], "other"))
    assert any(words in failure for words in refused), failure
    assert [path.name for path in (tmp_path / "other").iterdir()] == []


def test_a_writable_directory_that_is_gone_takes_no_confinement_along(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    task = open_task(prompts=ROWS, reward=samples.length, writable=(str(gone),))
    with task.score_pool() as pool:
        before = pool.isolation
    gone.rmdir()
    with task.score_pool() as pool:
        assert pool.isolation == before


@pytest.mark.parametrize("name", ["nowhere", "a-file", ""])
def test_what_is_no_directory_cannot_be_writable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("x")
    with pytest.raises(TaskError, match=f"task.writable must name .*: `{name}` is none. Make it"):
        open_task(prompts=ROWS, reward="exact", writable=(".", name))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("/dev/shm", "/dev/shm"),
        ("shared", "/dev/shm"),  # a link
        ("/proc/self", "/proc"),
        ("home/.ssh", "{home}/.ssh"),
        ("home/.config/gh/notes", "{home}/.config/gh"),
        ("home/../home/.aws/notes", "{home}/.aws"),
    ],
)
def test_what_workers_do_not_see_cannot_be_writable(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for hidden in (".ssh", ".config/gh/notes", ".aws/notes"):
        (home / hidden).mkdir(parents=True)
    (tmp_path / "shared").symlink_to("/dev/shm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    place = place.format(home=home)
    if not Path(place).exists():
        pytest.skip(f"no {place} here")
    with pytest.raises(TaskError, match=re.escape(f"`{name}` is in `{place}`, which is hidden")):
        open_task(prompts=ROWS, reward="exact", writable=(".", name))


def test_neighbours_of_what_is_hidden_can_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names that mean the same from everywhere."""
    home = tmp_path.resolve() / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".sshd").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    task = open_task(prompts=ROWS, reward="exact", writable=(".", ".sshd"))
    assert task.settings.writable == (str(home), str(home / ".sshd"))


def test_fingerprints_are_those_that_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is edited in a run is not taken for what was accepted at its start."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "a_reward_edited_later.py"
    file.write_text("def reward(response): return 1.0\n")
    task = open_task(prompts=ROWS, reward="a_reward_edited_later:reward")
    before = task.fingerprints
    file.write_text("def reward(response): return 2.0\n")
    assert task.fingerprints == before
    again = open_task(prompts=ROWS, reward="a_reward_edited_later:reward")
    assert again.fingerprints != before


def test_what_is_not_kept_from_the_workers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    task = open_task(prompts=ROWS, reward=lambda response: 0.0, environment=samples.Count)
    with task.score_pool() as pool:
        assert task.gaps == tuple(pool.isolation.gaps())
    for name in ("confine_files", "mount_read_only"):  # a fork has it as well
        monkeypatch.setattr(linux, name, lambda *_: False)
    task.score_pool().close()
    assert "files outside the scratch directory (no Landlock)" in task.gaps
    once = task.gaps
    task.environment_pool().close()
    assert task.gaps == once


def test_rewards_in_every_form() -> None:
    assert [function.name for function in reward_functions("exact")] == ["exact"]
    assert [function.name for function in reward_functions("a.b:C.d")] == ["C.d"]
    assert [function.name for function in reward_functions(samples.length)] == ["length"]
    assert [
        function.name for function in reward_functions({"x": "exact", "y": samples.length})
    ] == ["x", "y"]
    assert [
        function.name for function in reward_functions([samples.length, lambda response: 0])
    ] == [
        "length",
        "<lambda>",
    ]
    assert reward_functions(None) == ()


def test_fingerprints_tell_tasks_apart(tmp_path: Path) -> None:
    model = make_directory(tmp_path / "a")
    other = make_directory(tmp_path / "b", template=None)

    def fingerprint(directory: Path | None = model, reward: Any = "exact", **how: Any) -> str:
        how.setdefault("prompts", ROWS)
        return str(open_task(directory, reward=reward, **how).fingerprints)

    assert fingerprint() == fingerprint(reward_timeout_s=1.0, seed=3)
    different = [
        fingerprint(),
        fingerprint(other),
        fingerprint(None),
        fingerprint(reward="numeric"),
        fingerprint(reward=samples.length),
        fingerprint(reward=None, environment=samples.Count),
        fingerprint(prompts=ROWS[:3]),
        fingerprint(answer_key="result"),
        fingerprint(system="be brief"),
    ]
    assert len(set(different)) == len(different)


def test_a_reward_with_other_code_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "a_reward_of_mine.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    def fingerprints(code: str) -> dict[str, str]:
        module.write_text(f"def reward(response, example):\n    return {code}\n")
        importlib.invalidate_caches()
        return open_task(None, reward="a_reward_of_mine:reward", prompts=ROWS).fingerprints

    before, after = fingerprints("1.0"), fingerprints("2.0")
    assert before["reward"] != after["reward"]
    assert {**before, "reward": ""} == {**after, "reward": ""}
    assert fingerprints("1.0") == before


def test_names_lead_to_objects_and_back() -> None:
    assert name_of(samples.Count.step) == "tests.tasks.samples:Count.step"
    assert import_object("tests.tasks.samples:Count.step", "x") is samples.Count.step
    assert name_of(lambda: 0) is None
    assert name_of(samples.Count()) is None
    assert name_of(samples.Count().step) is None
    assert name_of(3) is None


@pytest.mark.slow
def test_problems_of_reasoning_gym_are_scored_by_itself() -> None:
    pytest.importorskip("reasoning_gym")
    task = open_task(prompts="gym:leg_counting", reward="gym", seed=5, reward_timeout_s=30.0)
    first, far = *task.stream.read(0, 1), *task.stream.read(1234, 1)
    assert task.stream.read(1234, 1) == [far] != [first]
    with task.score_pool() as pool:
        for prompt in (first, far):
            right = task.job(prompt, f"so <answer>{prompt.answer}</answer>")
            assert pool.run(right).reward == 1.0
            assert pool.run(task.job(prompt, "<answer>no</answer>")).reward < 0.5


def test_a_gym_of_some_size_has_epochs() -> None:
    pytest.importorskip("reasoning_gym")
    source = Gym("leg_counting", 1, {"size": 3, "max_animals": 4})
    assert source.length == 3 and source.row(3) is None
    assert source.identity() == Gym("leg_counting", 1, {"size": 3, "max_animals": 4}).identity()
    assert source.identity() != Gym("leg_counting", 2, {"size": 3, "max_animals": 4}).identity()
    with pytest.raises(TaskError, match=r"`gym:no_such` cannot be made: .*not registered"):
        Gym("no_such", 1, {})
    with pytest.raises(TaskError, match=r"cannot be made: TypeError"):
        Gym("leg_counting", 1, {"colour": 3})


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("thus \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("$x = \\frac{2}{4}$", "1/2", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
    ],
)
def test_math_is_verified(response: str, answer: str, score: float) -> None:
    pytest.importorskip("math_verify")
    from dora_rl.tasks.rewards import math_answer

    assert math_answer(response, answer) == score


def test_neither_tasks_nor_workers_load_what_is_heavy() -> None:
    program = (
        "import sys\n"
        "import dora_rl.sandbox.zygote_main\n"
        "print(*{'torch', 'pydantic', 'numpy', 'jinja2', 'tokenizers'} & sys.modules.keys())\n"
        "import dora_rl.tasks.task\n"
        "print(*{'torch', 'numpy', 'jinja2', 'transformers', 'tokenizers'} & sys.modules.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n\n"


# What a resume compares


def outside_sys_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """The directory is the working one, and on no search path, as for the console script."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])


@pytest.mark.parametrize("of", ["reward", "environment"])
def test_code_in_the_working_directory_is_told_apart(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a package, and of modules that the code imports."""
    outside_sys_path(monkeypatch, tmp_path)
    (tmp_path / "own").mkdir()
    files = {
        "own/__init__.py": "",
        "own/code.py": "from .more import X\n",
        "own/more.py": "X = 1\n",
    }

    def fingerprint() -> str:
        return open_task(prompts=ROWS, **{of: "own.code:thing"}).fingerprints[of]

    def write() -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)

    write()
    before = fingerprint()
    for name in files:
        (tmp_path / name).write_text(files[name] + "Y = 2\n")
        assert fingerprint() != before, name
        write()
        assert fingerprint() == before, name
    assert "own" not in sys.modules


def test_a_module_in_a_directory_that_is_named_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a_reward_elsewhere.py").write_text("def reward(r, /): return 7\n")
    outside_sys_path(monkeypatch, tmp_path)
    how: dict[str, Any] = {"reward": "a_reward_elsewhere:reward", "prompts": ROWS}
    with pytest.raises(LoadError, match=r"task.reward: no module `a_reward_elsewhere`"):
        open_task(**how).fingerprints  # noqa: B018
    task = open_task(**how, import_path=("elsewhere",))
    assert len(task.fingerprints["reward"]) == 32
    (prompt,) = task.stream.read(0, 1)
    with task.score_pool() as pool:
        assert pool.run(task.job(prompt, "")).reward == 7.0


def test_prompts_of_two_modules_of_one_name_are_not_confused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside_sys_path(monkeypatch, tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows_of_two.py").write_text(f"rows = ['{folder}']\n")

    def first(folder: str) -> str | None:
        task = open_task(prompts="rows_of_two:rows", reward="exact", import_path=(folder,))
        return task.stream.read(0, 1)[0].text

    try:
        assert first("a") == "a"
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "/a" not in entry[-2:]])
        with pytest.raises(LoadError, match=r"was imported from .*Rename one"):
            first("b")
    finally:
        sys.modules.pop("rows_of_two", None)


def test_the_code_of_prompts_counts_beyond_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside_sys_path(monkeypatch, tmp_path)
    file = tmp_path / "rows_in_time.py"

    def fingerprint(row: str) -> str:
        file.write_text(f"def row(position, seed): return {row}\n")
        sys.modules.pop("rows_in_time", None)
        importlib.invalidate_caches()
        return open_task(prompts="rows_in_time:row", reward="exact").fingerprints["prompts"]

    try:
        assert fingerprint("'x'") != fingerprint("'x' if position < 99 else 'y'")
    finally:
        sys.modules.pop("rows_in_time", None)


def test_every_row_of_a_long_list_counts_and_those_that_evaluate_too() -> None:
    rows = [{"prompt": str(n)} for n in range(10_000)]
    changed = [*rows[:17], {"prompt": "other"}, *rows[18:]]

    def fingerprint(prompts: list[Any], evaluate: list[Any] | None = None) -> str:
        settings = TaskSettings()
        task = Task.open(
            settings,
            model_directory=None,
            seed=0,
            reward="exact",
            prompts=prompts,
            eval_prompts=evaluate,
        )
        return task.fingerprints["prompts"]

    found = [fingerprint(rows), fingerprint(changed), fingerprint(rows, ROWS)]
    found.append(fingerprint(rows, ROWS[1:]))
    assert len(set(found)) == 4


class Scaled:
    """A reward that is an object."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __call__(self, response: str) -> float:
        return float(self.scale * len(response))


def test_an_object_is_known_by_its_code_and_what_it_holds() -> None:
    def fingerprint(reward: Any) -> str:
        return open_task(prompts=ROWS, reward=reward).fingerprints["reward"]

    assert fingerprint(Scaled(1)) == fingerprint(Scaled(1)) != fingerprint(Scaled(2))
    one, two = (functools.partial(scaled, scale=scale) for scale in (1, 2))
    assert fingerprint(one) == fingerprint(one) != fingerprint(two)


def scaled(response: str, scale: int) -> float:
    return float(scale * len(response))


def test_code_that_cannot_be_read_is_so_marked() -> None:
    typed: dict[str, Any] = {}
    exec("def reward(response): return 1.0\ndef rows(): yield 'x'", typed)
    task = open_task(prompts=typed["rows"](), reward=typed["reward"])
    assert task.fingerprints["reward"] == task.fingerprints["prompts"] == UNREADABLE
    held = open_task(prompts=ROWS, reward=Scaled(object()))
    assert held.fingerprints["reward"] == UNREADABLE
