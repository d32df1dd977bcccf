"""Start an engine of vLLM's here, and attach it once it has loaded its model.

The engine connects by sockets in the run directory. It serves this process alone, and ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_process import AttachedProcess, make_core, read_ready
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.launch.handshake import LaunchHandshake
from penstock.engine.attach.launch.serve_command import launch_arguments
from penstock.engine.attach.launch.vllm_process import VllmProcess
from penstock.engine.attach.pooling.abilities import find_abilities
from penstock.wire.vllm.messages import Addresses, HandshakeReply

POLL_S = 0.1
MAX_SHOWN_CHARS = 100
"""Characters of a line that is shown as progress."""
ONLY_RANK = 0
"""The rank of the engine to vLLM, which knows of no others."""


def start_engine(
    config: ServeConfig,
    model_dir: str,
    *,
    run_dir: str,
    rank: int,
    epoch: int,
    given: Sequence[str],
    progress: Callable[[str, float | None], None],
) -> AttachedProcess:
    """Start the engine of ``rank``. ``epoch``: how many this process succeeds; ``given``: fields of
    ``config`` that the operator has set. Each line of vLLM's is progress. Raises ConfigError for an engine
    that ends by itself or that this server cannot have, EngineLost, OSError, zmq.ZMQError."""
    requests, outputs = (f"ipc://{Path(run_dir) / f'vllm-{rank}-{epoch}-{way}'}" for way in ("in", "out"))
    connection = EngineConnection((requests, outputs), ONLY_RANK)
    handshake = LaunchHandshake(handshake_reply(config, rank, (requests, outputs)))
    process = VllmProcess(config.vllm_command, launch_arguments(config, model_dir, given, handshake.address))
    shown = ""

    def check() -> None:
        nonlocal shown
        if (failure := process.failure()) is not None:
            raise ConfigError(failure)
        if process.latest != shown:
            shown = process.latest
            progress(f"vLLM: {shown[:MAX_SHOWN_CHARS]}", None)

    try:
        raw = None
        while raw is None or not handshake.has_loaded:
            check()
            handshake.answer()
            raw = raw or connection.receive_ready()
            connection.wait(POLL_S)
        ready = read_ready(raw, config, rank)
        core = make_core(config, connection, ready, rank, check)
        return AttachedProcess(connection, ready, core, find_abilities(core, check), process.end)
    except BaseException:
        process.end()
        connection.close()
        raise
    finally:
        handshake.close()


def handshake_reply(config: ServeConfig, rank: int, addresses: tuple[str, str]) -> HandshakeReply:
    """Return what the engine is told: where to connect, and its place among the others. By its number it
    offsets ports, of KV events and connectors; by its number among those of its machine it takes the GPUs
    after those of the ones before. On a Ray cluster each has the GPUs that Ray has given it."""
    requests, outputs = addresses
    on_ray = config.data_parallel_backend == "ray"
    local_rank = 0 if on_ray else rank - config.ranks.start
    return HandshakeReply(
        Addresses([requests], [outputs]),
        {"data_parallel_index": rank, "data_parallel_rank_local": local_rank},
    )
