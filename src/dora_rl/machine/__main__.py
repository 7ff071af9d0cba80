"""Try fast paths: `python -m dora_rl.machine NAME…`. A JSON line for each, once it is known."""

import json
import sys

from dora_rl.machine.fast_paths import attempt

for name in sys.argv[1:]:
    print(json.dumps([name, *attempt(name)]), flush=True)
