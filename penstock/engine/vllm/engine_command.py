"""The commands that start engines to be attached: ``vllm serve --headless``, one for each host."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.vllm.arguments import engine_options
from penstock.wire.vllm.addresses import EVERYWHERE, split_address

_SET = "the command has it already, by --attach and --data-parallel-size"
_SERVED = "clients connect here; set it before --"
OWN = {
    "--headless": _SET,
    "--data-parallel-size": _SET,
    "-dp": _SET,
    "--data-parallel-size-local": _SET,
    "-dpl": _SET,
    "--data-parallel-start-rank": _SET,
    "-dpr": _SET,
    "--data-parallel-address": _SET,
    "-dpa": _SET,
    "--data-parallel-rpc-port": _SET,
    "-dpp": _SET,
    "--host": _SERVED,
    "--port": _SERVED,
    "--uds": _SERVED,
    "--api-key": _SERVED,
    "--api-server-count": _SERVED,
}
"""Arguments of vllm serve that are refused behind ``--``, and why."""
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
    _check_behind(config)
    if config.revision is not None:
        options = ["--revision", config.revision, *options]
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


def _check_behind(config: ServeConfig) -> None:
    """Raises ConfigError for arguments behind ``--`` that are Penstock's to set, or of vLLM's API server."""
    for argument in config.engine_args or ():
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in OWN:
            raise ConfigError(f"{argument} behind --: with --attach it is not the engine's: {OWN[flag]}")
