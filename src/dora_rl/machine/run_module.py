"""A module of this package run by a Python that does not have it: `PYTHON run_module.py MODULE …`.

An engine may need an environment of its own. Of the environment that this package is installed in,
that Python gets this package and nothing else, so that the libraries of the two never mix.
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
    sys.path.pop(0)  # the directory of this file, whose modules are none of the top level
    spec.loader.exec_module(package)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
