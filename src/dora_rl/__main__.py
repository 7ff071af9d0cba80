"""`python -m dora_rl`: the command line, where the script is not on the path."""

import sys

from dora_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
