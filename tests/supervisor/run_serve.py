"""``run_serve.py CONFIG BEHAVIOUR``: a supervisor for tests, in a process of its own.

CONFIG is a ServeConfig as JSON; BEHAVIOUR is for fake_child.py, empty for children as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.children.parent_death import child_command
from penstock.supervisor.main import serve

if __name__ == "__main__":
    config = msgspec.json.decode(sys.argv[1], type=ServeConfig)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    command = [*child_command("tests.supervisor.fake_child"), sys.argv[2]] if sys.argv[2] else None
    try:
        sys.exit(serve(config, child_command=command))
    except ConfigError as error:
        sys.exit(f"penstock: error: {error}")
