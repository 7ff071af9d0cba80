"""A module of this package run by a Python that lacks it: `PYTHON -I run_module.py MODULE …`.

An engine may need an environment of its own. Of the environment that this package is installed in,
that Python gets this package and nothing else, so that the libraries of the two never mix. `-I`
keeps PYTHONPATH and the like from it, too.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

PACKAGE = "dora_rl"


def main() -> None:
    _, module, *arguments = sys.argv
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    # Without -I the directory of this file is there, whose modules are none of the top level.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    spec.loader.exec_module(package)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
