"""Models by their names on the hub: downloaded from a server of this test's, cached, refused."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.prepare import hub, model_source
from dora_rl.runtime.prepare.model_source import find_model
from tests.patience import PATIENCE_S

NAME = "somebody/small-model"
COMMIT = "a" * 40
FIND = (
    "import sys\n"
    "from dora_rl.core.protocol.errors import UserError\n"
    "from dora_rl.runtime.prepare import hub\n"
    "hub._PATIENCE_S = 120.0\n"  # a busy machine is no missing network
    "from dora_rl.runtime.prepare.model_source import find_model\n"
    "try:\n    print(find_model(sys.argv[1]))\n"
    "except UserError as error:\n    sys.exit(str(error))\n"
)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a hub as one model needs."""

    model: Path

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        body, headers, code = b"{}", {"Content-Type": "application/json"}, 404
        files = {file.name: file.read_bytes() for file in self.model.iterdir()}
        if path.startswith(f"/api/models/{NAME}/tree/"):
            rows = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in files.items()
            ]
            body, code = json.dumps(rows).encode(), 200
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in files]
            facts = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings}
            body, code = json.dumps(facts | {"private": False, "tags": []}).encode(), 200
        elif path.startswith(f"/{NAME}/resolve/") and path.rpartition("/")[2] in files:
            body, code = files[path.rpartition("/")[2]], 200
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[str]:
    """The model, and beside it what must not be downloaded."""
    served = tmp_path / "served"
    served.mkdir()
    for file in model.iterdir():
        (served / file.name).write_bytes(file.read_bytes())
    (served / "pytorch_model.bin").write_bytes(b"a pickle")
    (served / "modeling.py").write_text("raise SystemExit")
    handler = type("Serving", (Hub,), {"model": served})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()


def found(name: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads its settings when it is imported."""
    quiet = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", FIND, name],
        env=environment | quiet | more,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_model_is_downloaded_once_and_without_pickles(
    server: str, model: Path, tmp_path: Path
) -> None:
    done = found(NAME, tmp_path / "home", HF_ENDPOINT=server)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert {file.name for file in directory.iterdir()} == {file.name for file in model.iterdir()}
    for file in model.iterdir():
        assert (directory / file.name).read_bytes() == file.read_bytes()
    closed = f"http://127.0.0.1:{free_port()}"
    assert found(NAME, tmp_path / "home", HF_ENDPOINT=closed).stdout == done.stdout
    (directory / "model.safetensors").unlink()  # as an interrupted download leaves it
    assert "cannot be reached" in found(NAME, tmp_path / "home", HF_ENDPOINT=closed).stderr
    assert found(NAME, tmp_path / "home", HF_ENDPOINT=server).stdout == done.stdout
    assert (directory / "model.safetensors").is_file()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "closed"}, "the hub cannot be reached"),
        ({"HF_ENDPOINT": "server"}, "`somebody/else` is not there, or is private"),
    ],
)
def test_what_cannot_be_had_says_what_to_do(
    settings: dict[str, str], message: str, server: str, tmp_path: Path
) -> None:
    places = {"closed": f"http://127.0.0.1:{free_port()}", "server": server}
    more = {key: places.get(value, value) for key, value in settings.items()}
    done = found("somebody/else", tmp_path / "home", **more)
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert "hf download somebody/else" in done.stderr or "hf auth login" in done.stderr


def test_a_host_that_does_not_answer_is_not_waited_for() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
        hub._within(0.01, never.wait)
    never.set()


@pytest.mark.parametrize("path", ["nowhere", "a/b/c", "./quickstart", ""])
def test_what_is_no_model_names_all_that_are_packaged(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"Qwen/Qwen3-0\.6B, or a packaged model") as refused:
        find_model(path)
    assert all(name in str(refused.value) for name in model_source.PACKAGED)
    assert {"quickstart", "smollm2"} <= set(model_source.PACKAGED)


def test_a_directory_comes_before_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebody").mkdir()
    (tmp_path / NAME).symlink_to(model)
    assert find_model(NAME) == Path(NAME)
