"""The recipes of `deploy/`: files that parse, and whose commands, options and keys exist.

None of SLURM, Kubernetes, SkyPilot and Docker is here. What a recipe does is run as far as a shell
can: `deploy/slurm.sh` against stand-ins of SLURM's commands and of Ray.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dora_rl.runtime.launchers.ray.installation import _BELOW, _LEAST
from tests.docs.commands import Shown, check
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FILES = {"Dockerfile", "kuberay.yaml", "skypilot.yaml", "slurm.sh"}
# In place of what a recipe finds on its cluster.
_NAMES = {
    **{"$run": "runs/a", "$config": "my.toml"},
    **{"/runs/my-run": "runs/a", "/runs/my.toml": "my.toml"},
}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def scripts() -> dict[str, str]:
    return {
        "slurm.sh": (DEPLOY / "slurm.sh").read_text(encoding="utf-8"),
        "skypilot.yaml": load("skypilot.yaml")["run"],
        "kuberay.yaml": load("kuberay.yaml")["spec"]["entrypoint"],
        "Dockerfile": " ".join(json.loads(re.findall(r"^CMD (.*)$", dockerfile(), re.M)[0])),
    }


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def commands(script: str) -> list[str]:
    """The calls of dora-rl in a script."""
    found = re.findall(r"dora-rl [a-z][^;&|\n']*", script.replace("\\\n", " "))
    return [text for text in found if not text.startswith(("dora-rl with", "dora-rl is"))]


def test_the_recipes_are_these() -> None:
    assert {path.name for path in DEPLOY.iterdir()} == FILES


@pytest.mark.parametrize("name", sorted(FILES))
def test_what_a_recipe_calls_exists(name: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[model]\npath = "quickstart"\n', encoding="utf-8")
    called = commands(scripts()[name])
    assert called, "a recipe that calls nothing runs nothing"
    for text in called:
        for word, stand_in in _NAMES.items():
            text = text.replace(word, stand_in)
        text = " ".join(shlex.split(text.replace('"', " ").strip()))
        assert check([Shown(text, name, 1)], tmp_path) == []


def test_scripts_are_shell() -> None:
    for name, text in scripts().items():
        for shell in ("bash",) if name == "slurm.sh" else ("sh",):
            subprocess.run([shell, "-n"], input=text, text=True, check=True)
    for step in re.findall(r"^RUN (.*)$", dockerfile(), re.M):
        subprocess.run(["sh", "-n"], input=step, text=True, check=True)


def test_the_manifest_is_a_ray_job_with_a_token_and_shared_storage() -> None:
    job = load("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    version = tuple(map(int, cluster["rayVersion"].split(".")[:2]))
    assert _LEAST <= version < _BELOW
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        named = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["runs"] == "/runs" and set(mounts) == named
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_task_has_a_volume_a_token_and_a_head() -> None:
    task = load("skypilot.yaml")
    assert task["num_nodes"] > 1 and task["volumes"] == {"/runs": "dora-rl-runs"}
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}  # asked for, in no file
    assert task["envs"]["RAY_AUTH_MODE"] == "token"
    assert all(isinstance(value, str) for value in task["envs"].values())


def test_the_image_copies_what_is_there_and_installs_extras_that_are() -> None:
    text = dockerfile()
    for copied in re.findall(r"^COPY (.*)$", text, re.M):
        *sources, _ = copied.split()
        assert all((ROOT / source).exists() for source in sources), copied
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    asked = re.findall(r"\.\[([a-z,]+)\]", load("skypilot.yaml")["setup"])
    assert set(asked[0].split(",")) <= set(project["optional-dependencies"])


# slurm.sh, run

STAND_INS = {
    "scontrol": """
        [ "$1" = show ] && printf 'node1\\nnode2\\nnode3\\n' || echo "scontrol $*" >>"$LOG" """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do shift; done
        [ "$1" = hostname ] && { echo "10.0.0.1 10.0.0.9"; exit; }
        echo "$* token=${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE" >>"$LOG"
        exec sleep 600""",
    "python": "echo 3",
    "dora-rl": """
        echo "dora-rl $* address=$RAY_ADDRESS" >>"$LOG"
        trap 'echo stopped >>"$LOG"; exit 130' TERM
        while [ -n "$WAITS" ]; do sleep 0.05; done""",
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on three nodes, in which all that it calls is written to a log."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in STAND_INS.items():
        path = programs / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_ID": "7",
        "WAITS": "",
    }


def job(cluster: dict[str, str], run: Path) -> "subprocess.Popen[bytes]":
    command = ["bash", str(DEPLOY / "slurm.sh"), "my.toml", str(run)]
    return subprocess.Popen(command, env=cluster, stdout=subprocess.DEVNULL)


needs_od = pytest.mark.skipif(sys.platform != "linux", reason="SLURM's nodes are Linux")


@needs_od
def test_a_slurm_job_starts_a_cluster_and_a_run(cluster: dict[str, str], tmp_path: Path) -> None:
    assert job(cluster, tmp_path / "run").wait(PATIENCE_S) == 0
    said = Path(cluster["LOG"]).read_text(encoding="utf-8").splitlines()
    head = next(line for line in said if "--head" in line)
    others = next(line for line in said if "--address=10.0.0.1:6379" in line)
    assert "--node-ip-address=10.0.0.1 --port=6379" in head
    for line in (head, others):
        assert line.endswith("--block token=64 token")
    started = next(line for line in said if line.startswith("dora-rl"))
    assert started == (
        f"dora-rl train my.toml --set runtime.kind=ray --out {tmp_path / 'run'} --plain "
        "address=10.0.0.1:6379"
    )


@needs_od
def test_a_slurm_job_that_is_to_end_stops_its_run_and_is_requeued_to_resume_it(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "ledger.sqlite").touch()
    process = job({**cluster, "WAITS": "1"}, run)
    log = Path(cluster["LOG"])
    deadline = time.monotonic() + PATIENCE_S
    while not (log.exists() and "--resume" in log.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    said = log.read_text(encoding="utf-8").splitlines()
    assert said[-2:] == ["stopped", "scontrol requeue 7"]
