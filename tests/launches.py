"""What a child is told to run as, for tests of one process."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.serve import ServeConfig
from penstock.wire.control import Launch, Role


def launch(role: Role, directory: str = "/somewhere", **fields: Any) -> Launch:
    """A child's first start, with everything it reads in ``directory``; ``fields`` replace what is usual."""
    usual = Launch(
        role=role,
        index=0,
        epoch=0,
        config=ServeConfig(),
        run_dir=directory,
        model_dir=directory,
        tokenizer_dir=directory,
        served_model_names=["m"],
        api_server_count=1,
        engine_count=1,
    )
    return msgspec.structs.replace(usual, **fields)
