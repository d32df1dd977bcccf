"""The commands that start engines to be attached: ``vllm serve --headless``, one for each host."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence

from penstock.config.serve import ServeConfig
from penstock.engine.vllm.arguments import engine_options
from penstock.wire.vllm.addresses import EVERYWHERE, split_address

ADAPTER_ROOM = 2
"""vLLM's --max-cpu-loras is this many times Penstock's: vLLM must never drop an adapter that streams use,
also while another version of it is loaded."""


def engine_commands(config: ServeConfig, model: str, given: Sequence[str]) -> list[str]:
    """The commands, in the order of ranks. ``model``: as vLLM is to find it; ``given``: fields of ``config``
    that the operator has set. Raises ConfigError."""
    assert config.attach is not None
    host, port = split_address(config.attach)
    if host in EVERYWHERE:
        host = socket.gethostname()
    local = config.data_parallel_size_local or config.data_parallel_size
    options = engine_options(config, given, adapter_room=ADAPTER_ROOM)
    return [
        shlex.join(
            [
                *("vllm", "serve", model, "--headless"),
                *("--data-parallel-size", str(config.data_parallel_size)),
                *("--data-parallel-size-local", str(local)),
                *("--data-parallel-start-rank", str(first)),
                *("--data-parallel-address", host, "--data-parallel-rpc-port", str(port)),
                *options,
            ]
        )
        for first in range(0, config.data_parallel_size, local)
    ]
