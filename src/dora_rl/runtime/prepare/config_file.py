"""A run's TOML file: what it names is looked up beside the file first, then from where one works.

Names are rewritten once, when the file is read, so that everybody after it knows paths from the
working directory alone. What is given on the command line or from Python means the working
directory in the first place, and is none of this.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dora_rl.config import load_toml
from dora_rl.runtime.prepare.model_source import is_packaged
from dora_rl.tasks.sources import names_code


def load(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file, with paths and modules that lie beside it found there."""
    data = load_toml(path)
    folder = Path(path).parent
    model, task = data.get("model"), data.get("task")
    if isinstance(model, dict) and "path" in model and not is_packaged(str(model["path"])):
        model["path"] = _beside(folder, model["path"])
    if isinstance(task, dict):
        _resolve_task(task, folder)
    return data


def _resolve_task(task: dict[str, Any], folder: Path) -> None:
    for key in ("prompts", "eval_prompts"):
        if isinstance(task.get(key), str) and not names_code(task[key]):
            task[key] = _beside(folder, task[key])
    for key in ("writable", "import_path"):
        if isinstance(task.get(key), list):
            task[key] = [_beside(folder, entry) for entry in task[key]]
    if folder != Path() and any(_is_module(folder, name) for name in _modules(task)):
        path = task.get("import_path", [])
        if isinstance(path, list):  # else a mistake, which is told when it is validated
            task["import_path"] = [str(folder), *path]


def _beside(folder: Path, name: Any) -> Any:
    """The path from here, if there is such a file beside the TOML file."""
    if not isinstance(name, str) or not name:
        return name
    try:
        found = (folder / name).exists()
    except (OSError, ValueError):  # no path, but something else
        return name
    return str(folder / name) if found else name


def _modules(task: Mapping[str, Any]) -> Iterator[str]:
    """Every `module:attribute` of a task, by its module."""
    reward = task.get("reward")
    rewards: list[Any] = [reward]
    if isinstance(reward, list):
        rewards = [entry.get("function") for entry in reward if isinstance(entry, dict)]
    named = [task.get("prompts"), task.get("eval_prompts"), task.get("environment"), *rewards]
    for name in named:
        if isinstance(name, str) and names_code(name):
            yield name.partition(":")[0]


def _is_module(folder: Path, name: str) -> bool:
    top = folder / name.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()
