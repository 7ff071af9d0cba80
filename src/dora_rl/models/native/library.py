"""The compiled kernels: built once on a machine by its C compiler, cached, loaded by ctypes.

A file of the cache is named by a digest of the sources, the compiler, its options and the
processor, so that it is never used elsewhere. No header of Python or torch takes part: another
version of either changes nothing. Nothing here imports torch.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from ctypes import POINTER, c_int, c_int64, c_void_p
from pathlib import Path

from dora_rl.machine import processor
from dora_rl.machine.fast_paths import Unavailable
from dora_rl.machine.user_cache import user_cache
from dora_rl.models.native.structures import Batch, LoneProduct, Shape

_SOURCES = Path(__file__).parent
_MAIN = "decoder.c"
_OPTIONS = (
    *("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_COMPILE_TIMEOUT_S = 120.0  # it takes four seconds


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if they are not in the cache. Raises `Unavailable` with the reason."""
    return _declared(compiled(_SOURCES / _MAIN))


def compiled(main: Path) -> ctypes.CDLL:
    """The library of a C file, compiled if it is not in the cache, or `Unavailable`.

    It may include what lies beside it, and the headers that lie here.
    """
    try:
        compiler = _compiler()
        options = (*_OPTIONS, "-mcpu=native" if _is_arm() else "-march=native")
        key, cache = _key(compiler, options, main), _cache()
        command = [*compiler, *options, f"-I{_SOURCES}"]
        return ctypes.CDLL(str(_kept(cache, key) or _compile(command, main, cache, key)))
    except (OSError, RuntimeError, ValueError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error


def _key(compiler: list[str], options: tuple[str, ...], main: Path) -> str:
    """Of all that decides which instructions come out."""
    beside = {main, *main.parent.glob("*.h"), *_SOURCES.glob("*.h")}
    sources = sorted(beside, key=lambda path: (path.name, path))
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256()
    for part in (*map(Path.read_bytes, sources), repr((compiler, options, version)).encode()):
        digest.update(hashlib.sha256(part).digest())
    digest.update(repr((platform.machine(), sorted(processor.flags()))).encode())
    return digest.hexdigest()[:16]


def _kept(cache: Path, key: str) -> Path | None:
    """What was compiled before, if it is whole and private: to load half of it would be fatal."""
    for path in cache.glob(f"kernels-{key}-*.so"):
        with suppress(FileNotFoundError):  # another process removed it first
            if _private(path.lstat()) and path.stem.endswith(_digest(path)):
                return path
            path.unlink()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _private(found: os.stat_result) -> bool:
    """Nobody else can write to it."""
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def why_unavailable() -> str | None:
    """Why the kernels cannot be had here; None where they can."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if found := shutil.which(words[0]):
            return [found, *words[1:]]
    raise Unavailable(f"no C compiler: `{named[0] if named else 'cc'}` is not on the PATH")


def _is_arm() -> bool:
    return platform.machine() in ("arm64", "aarch64")


def _compile(command: list[str], main: Path, cache: Path, key: str) -> Path:
    """To a name of its own first: several processes may do this at once."""
    handle, unfinished = tempfile.mkstemp(suffix=".unfinished", dir=cache)
    try:
        _run([*command, "-o", unfinished, str(main), "-lm"])
        if not os.stat(unfinished).st_size:
            raise Unavailable(f"`{command[0]}` wrote nothing")
        os.fsync(handle)
        path = cache / f"kernels-{key}-{_digest(Path(unfinished))}.so"
        os.chmod(unfinished, 0o700)
        os.replace(unfinished, path)
        return path
    finally:
        os.close(handle)
        Path(unfinished).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{command[0]}` took more than {_COMPILE_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise Unavailable(f"`{command[0]}` failed: {done.stderr.strip()[:160]}")
    return done.stdout


def _cache() -> Path:
    """A directory that nobody else can write to: what lies there is run."""
    reasons = []
    for find in (_user_cache, _temporary):
        try:
            place = find()
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.lstat()
            mine = stat.S_ISDIR(found.st_mode) and _private(found)
            if mine and os.access(place, os.W_OK | os.X_OK):
                return place
            reasons.append(f"others can write to `{place}`")
        except (OSError, RuntimeError) as error:
            reasons.append(str(error))
    raise Unavailable(f"no place for them: {'; '.join(reasons)}")


def _user_cache() -> Path:
    return user_cache() / "native"


def _temporary() -> Path:
    """Whose parent is everybody's, with a sticky bit."""
    return Path(tempfile.gettempdir()) / f"dora-rl-{os.getuid()}"


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.dora_panel.restype = c_int64
    loaded.dora_panel.argtypes = []
    loaded.dora_tile_rows.restype = c_int64
    loaded.dora_tile_rows.argtypes = []
    loaded.dora_dots_in_hardware.restype = c_int64
    loaded.dora_dots_in_hardware.argtypes = []
    loaded.dora_workspace.restype = c_int64
    loaded.dora_workspace.argtypes = [POINTER(Shape), POINTER(Batch), c_int64]
    loaded.dora_pass.restype = c_int
    loaded.dora_pass.argtypes = [POINTER(Shape), POINTER(Batch), c_int64]
    loaded.dora_product.restype = c_int
    loaded.dora_product.argtypes = [POINTER(LoneProduct), c_int64]
    loaded.dora_pack.restype = None
    loaded.dora_pack.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p]
    return loaded
