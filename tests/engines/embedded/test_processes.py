"""A trajectory moves to an engine in another process, and continues as if it had never moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.engines.base import Request, Sampled, Sampling
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings
from tests.engines.random_versions import Models

RECEIVER = """
import json, sys
from pathlib import Path
from dora_rl.engines.base import Sampled
from dora_rl.engines.embedded import EmbeddedEngine, EngineSettings

model, version, message = sys.argv[1:4]
settings = EngineSettings(slots=1, block_tokens=4, deterministic=sys.argv[4] == "True")
engine = EmbeddedEngine.for_model(model, settings)
engine.install(0, Path(version))
engine.import_trajectory(Path(message).read_bytes())
tokens, logprobs = [], []
while not engine.idle:
    for output in engine.step():
        assert isinstance(output, Sampled), output
        tokens += output.tokens
        logprobs += output.logprobs
print(json.dumps([tokens, logprobs]))
"""
SAMPLING = Sampling(temperature=0.8, top_p=0.9, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_move_to_another_process(tmp_path: Path, deterministic: bool) -> None:
    models = Models(tmp_path, "llama")
    settings = EngineSettings(slots=8, block_tokens=4, deterministic=deterministic)
    engine = EmbeddedEngine.for_model(models.directory, settings)
    digest = engine.install(0, models.path(0))
    request = Request(5, 0, (3, 1, 4, 1, 5), SAMPLING, seed=9)
    quiet = [output for output in _run(engine, [request], 20) if output.trajectory == 5]
    assert {output.digest for output in quiet} == {digest}

    mates = [Request(n, 0, (2, 7, n), SAMPLING, seed=n) for n in (6, 7)]
    before = [output for output in _run(engine, [request, *mates], 8) if output.trajectory == 5]
    message = tmp_path / "trajectory"
    message.write_bytes(engine.export_trajectory(5))
    arguments = [str(models.directory), str(models.path(0)), str(message), str(deterministic)]
    done = subprocess.run(
        [sys.executable, "-c", RECEIVER, *arguments], capture_output=True, text=True, check=True
    )
    tokens, logprobs = json.loads(done.stdout)
    assert [t for o in before for t in o.tokens] + tokens == [t for o in quiet for t in o.tokens]
    expected = [p for o in quiet for p in o.logprobs][len(before) :]
    assert logprobs == (expected if deterministic else pytest.approx(expected, abs=1e-4))


def _run(engine: EmbeddedEngine, requests: list[Request], steps: int) -> list[Sampled]:
    for request in requests:
        engine.submit(request)
    outputs = [output for _ in range(steps) for output in engine.step()]
    return [output for output in outputs if isinstance(output, Sampled)]
