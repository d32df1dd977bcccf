"""Attaches an engine: waits until it connects, and learns what it is.

An engine that has just started describes itself. One that was attached to an earlier process of Penstock's
only connects again: its description is in the run directory (:mod:`penstock.wire.vllm.attachment_file`). It
may still run requests of that time; they are aborted as their outputs arrive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_process import AttachedProcess, make_core, read_ready
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.pooling.abilities import find_abilities
from penstock.engine.attach.weight_loader import read_start_again, start_of
from penstock.logging_setup import RateLimitedLog
from penstock.wire.sockets import tcp_address
from penstock.wire.vllm.attachment_file import Attachment, AttachmentFile, data_ports
from penstock.wire.vllm.messages import EngineLost

log = logging.getLogger(__name__)
_warn = RateLimitedLog(log, logging.ERROR)

PROGRESS_INTERVAL_S = 5.0
"""Seconds between two progress messages of a process that waits; they extend its start timeout."""
POLL_S = 0.1
RECONNECTED_S = 1.0
"""After an engine has been connected for so long without a description, it has given that to an earlier
process."""


def attach(
    config: ServeConfig,
    address: tuple[str, int],
    file: AttachmentFile,
    rank: int,
    progress: Callable[[str, float | None], None],
) -> AttachedProcess:
    """Wait for the engine of ``rank``, until one comes that this server can have. ``address``: of the
    handshake. Raises ConfigError for addresses that cannot be bound, OSError."""

    def waiting(text: str = "waiting for vLLM's engine {}, which is not started or loads its model") -> None:
        progress(text.format(rank), None)

    while True:
        try:
            connection, saved = _connect(*address, rank, file)
        except zmq.ZMQError as error:
            raise ConfigError(f"--attach: {error}") from None
        try:
            return _attach_next(config, connection, file, saved, rank, waiting)
        except EngineLost as error:
            _warn("lost", "engine %d was lost while it was attached: %s", rank, error)
            connection.close()
        except BaseException:
            connection.close()
            raise


def _attach_next(
    config: ServeConfig,
    connection: EngineConnection,
    file: AttachmentFile,
    saved: bytes | None,
    rank: int,
    waiting: Callable[..., None],
) -> AttachedProcess:
    """Raises EngineLost."""
    refused = False
    while True:
        raw = _wait_for_engine(connection, file, saved, rank, waiting, quiet=refused)
        try:
            ready = read_ready(raw, config, rank)
            break
        except ConfigError as error:
            log.error("%s; waiting for another engine %d", error, rank)
            file.save(Attachment(connection.ports))
            saved, refused = None, True
    core = make_core(config, connection, ready, rank, waiting)
    read_start_again(core, start_of(config, str(config.model)), waiting)
    return AttachedProcess(connection, ready, core, find_abilities(core, waiting))


def _connect(host: str, port: int, rank: int, file: AttachmentFile) -> tuple[EngineConnection, bytes | None]:
    """The bound sockets of engine ``rank``, and the ReadyResponse that an earlier process has received.

    ``port``: that of the handshake, which the engines' follow; 0: the ports of an earlier process, or free
    ones. Raises zmq.ZMQError, OSError.
    """
    found = file.load()
    ports = data_ports(port, rank) if port else (0, 0) if found is None else found.ports
    requests, outputs = (tcp_address(host, number or "*") for number in ports)
    connection = EngineConnection((requests, outputs), rank)
    same = found is not None and found.ports == connection.ports
    ready = found.ready if found is not None and same else None
    file.save(Attachment(connection.ports, ready))
    return connection, ready


def _wait_for_engine(
    connection: EngineConnection,
    file: AttachmentFile,
    saved: bytes | None,
    rank: int,
    waiting: Callable[..., None],
    *,
    quiet: bool,
) -> bytes:
    """The ReadyResponse of the engine, once it is connected. ``waiting`` is called every few seconds.
    ``quiet``: an engine that is connected without a description has been refused, and that was told. Raises
    OSError when the description cannot be written."""
    connected_at: float | None = None
    next_progress = 0.0
    told = quiet
    while True:
        ready = connection.receive_ready()
        if ready is not None:
            file.save(Attachment(connection.ports, ready))
            return ready
        now = time.monotonic()
        connection.read_disconnects()
        while connection.receive() is not None:
            pass  # outputs of requests that nobody waits for any longer
        if not connection.is_connected():
            connected_at = None
        elif connected_at is None:
            connected_at = now
        elif now > connected_at + RECONNECTED_S:
            if saved is not None:
                log.info("engine %d was attached before, and is taken over", rank)
                return saved
            if not told:
                told = True
                log.error(
                    "engine %d has connected, but has described itself to an earlier server, of which this "
                    "one's run directory has no record (--run-dir): restart this engine",
                    rank,
                )
        if now >= next_progress:
            next_progress = now + PROGRESS_INTERVAL_S
            if connected_at is not None and told:
                waiting("vLLM's engine {} has to be restarted, see the log")
            else:
                waiting()
        connection.wait(POLL_S)
