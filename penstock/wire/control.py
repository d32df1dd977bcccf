"""The control channel: what the supervisor and each of its children say to each other.

One Unix stream socketpair per child carries JSON lines, each a tagged struct of this module.

Supervisor to child: :class:`Launch` first and once, then :class:`Drain`, :class:`Stop`; to API servers
:class:`EnginesDraining`, for which they ask with :class:`DrainEngine`, :class:`AgreedStates`, for which
they ask with :class:`ProposeState` and which they confirm by :class:`StatesAdopted`, and
:class:`EnableThroughputLog`. Child to supervisor: any number of :class:`Progress`, then :class:`Ready` or
:class:`ProcessFailed`; a child that meets its end later may send :class:`ProcessFailed` before it exits. An
engine sends :class:`Heartbeat` while it is ready. Ready, failed and dead (the end of the file, the exit
code) are three different signals.

The end of the file is a message too: a child that reads it has lost its supervisor and ends at once.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.config.options import ServeConfig
from penstock.wire.curve import ClusterKey

# A line is at most this many bytes, newline included. The largest, Launch, takes about 1 kB.
MAX_LINE_BYTES = 1 << 20
HEARTBEAT_INTERVAL_S = 1.0
"""Least time between two beats of an engine."""

Role = Literal["api-server", "engine", "coordinator"]
Info = dict[str, str | int | float | bool]


class ControlError(ValueError):
    """A line that is too long or is no message of this channel."""


# -- messages ------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Fields are only ever appended, with a default."""


class Launch(_Message, frozen=True, tag="launch"):
    """What a child runs as. Sent once, before anything else."""

    role: Role
    # Number of this process among those of its role, from 0. An API server that replaces another has the same
    # number modulo api_server_count.
    index: int
    # Processes of this role and index before it: (role, index, epoch) is unique while the supervisor lives.
    epoch: int
    config: ServeConfig
    # Directory of the sockets between processes, mode 0700, absolute.
    run_dir: str
    # Directory with config.json and weights; for an engine without a model one with a tokenizer alone.
    model_dir: str
    # Directory with tokenizer.json; model_dir unless --tokenizer names another or it had to be converted.
    tokenizer_dir: str
    # Names clients may use for the model, the first one is reported. Never empty.
    served_model_names: list[str]
    api_server_count: int
    engine_count: int
    # Process id of the supervisor: a child with another parent was orphaned before it could notice.
    supervisor_pid: int
    # Where members reach the coordinator; None: a fleet of one API server and one engine has none.
    coordinator: str | None = None
    # Ranks of the engines on the host of the API servers: these listen in the run directory. Others listen on
    # tcp://, and API servers learn from the coordinator where.
    local_ranks: list[int] = []
    # Of the supervisor's run, see penstock.wire.sockets.new_incarnation.
    incarnation: int = 0
    # What engines must have in common, as far as it is known before they start, by name.
    traits: dict[str, str] = {}
    # The fleet's secret key, for what goes over tcp://.
    cluster_key: str | None = None
    # The listening socket, TCP or Unix, inherited: only of a single API server, which accepts itself.
    listen_fd: int | None = None
    # Fields of config that the operator has set, wherever; the others hold their defaults.
    given: list[str] = []
    # The socket over which an API server is handed connections, see penstock.wire.handover, inherited: only
    # of one of several.
    handover_fd: int | None = None
    # How often this process was started again after it had died; ``epoch`` also counts earlier processes of
    # the same number, which others had replaced.
    restarts: int = 0

    @property
    def name(self) -> str:
        """Such as "engine 3"."""
        return f"{self.role} {self.index}"

    @property
    def key(self) -> ClusterKey | None:
        return None if self.cluster_key is None else ClusterKey(self.cluster_key)


class Drain(_Message, frozen=True, tag="drain"):
    """To an API server, and to the engines of a host that has none: finish what runs, then exit with 0 by
    itself.

    Requests that come meanwhile are refused. When it is ``replaced``, it leaves new connections to the
    others and serves those it has until they end. Stop follows when that takes too long.
    """

    replaced: bool = False


class Stop(_Message, frozen=True, tag="stop"):
    """To any child: end what still runs with an error to its client, release everything, exit with 0.

    A child that has not exited 5 seconds later is killed.
    """


class Progress(_Message, frozen=True, tag="progress"):
    """A start that goes on; renews the time the process has to become ready."""

    text: str
    # Share of the work that is done, 0 to 1; None when it is unknown.
    fraction: float | None = None


class Ready(_Message, frozen=True, tag="ready"):
    """The process serves. ``info`` is shown to the operator (device, cache size, …)."""

    info: Info = {}


class ProcessFailed(_Message, frozen=True, tag="failed"):
    """The process ends because of ``message``, written for the operator, without a traceback."""

    message: str
    # It would fail the same way again (no such file, option that does not fit): not restarted.
    fatal: bool


class Heartbeat(_Message, frozen=True, tag="beat"):
    """An engine's loop turns: sent between steps and while it waits for work, see HEARTBEAT_INTERVAL_S."""


class DrainEngine(_Message, frozen=True, tag="drain-engine"):
    """From an API server: engine ``rank`` is to get new streams no longer (``draining``), or again."""

    rank: int
    draining: bool


class EnginesDraining(_Message, frozen=True, tag="engines-draining"):
    """To every API server: the engines that get no new streams."""

    ranks: list[int]


class AgreedState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that all engines are to agree on, and what it is to be."""

    name: str
    # The change that led here.
    key: str
    # Revision of the change: later changes of any state have greater ones.
    version: int
    # What engines are called with.
    arguments: dict[str, Any]


class ProposeState(_Message, frozen=True, tag="propose-state"):
    """From an API server: every engine has prepared this change. It is decided unless the state has changed
    since ``base``; the answer, either way, is AgreedStates."""

    name: str
    key: str
    # Version of the state that the change started from; 0 for one that never changed.
    base: int
    arguments: dict[str, Any]


class AgreedStates(_Message, frozen=True, tag="agreed-states"):
    """To every API server: all states that ever changed. API servers see to it that engines reach them."""

    revision: int
    # The latest revision that every API server has confirmed.
    adopted: int
    states: list[AgreedState]


class StatesAdopted(_Message, frozen=True, tag="states-adopted"):
    """From an API server: it acts by this revision."""

    revision: int


class EnableThroughputLog(_Message, frozen=True, tag="speak"):
    """To one API server that serves: write what the fleet does to the log, until the end."""


class SupervisorMetrics(_Message, frozen=True, tag="supervisor-metrics"):
    """To API servers, about once a second: what the supervisor has counted."""

    # Encoded, see penstock.metrics.snapshot.
    snapshot: bytes


SupervisorCommand = Drain | Stop | EnginesDraining | AgreedStates | EnableThroughputLog | SupervisorMetrics
ChildReport = Progress | Ready | ProcessFailed | Heartbeat | DrainEngine | ProposeState | StatesAdopted

_to_child: msgspec.json.Decoder[Launch | SupervisorCommand] = msgspec.json.Decoder(Launch | SupervisorCommand)
_to_supervisor: msgspec.json.Decoder[ChildReport] = msgspec.json.Decoder(ChildReport)

# msgspec lets the second one through for a string that is not UTF-8.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)


# -- lines, without I/O --------------------------------------------------------------------------------


def encode(message: Launch | SupervisorCommand | ChildReport) -> bytes:
    """One line, newline included. Raises ControlError when it would exceed :data:`MAX_LINE_BYTES`."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ControlError(
            f"control message {type(message).__name__} has {len(line)} bytes, at most {MAX_LINE_BYTES}"
        )
    return line


class LineBuffer:
    """Cuts a byte stream into lines."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their newlines. Raises ControlError on a long one."""
        self._partial += data
        lines = self._partial.split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) >= MAX_LINE_BYTES or any(len(line) >= MAX_LINE_BYTES for line in lines):
            raise ControlError(f"control message of more than {MAX_LINE_BYTES} bytes")
        return [bytes(line) for line in lines]


def decode_for_child(line: bytes) -> Launch | SupervisorCommand:
    """Raises ControlError unless ``line`` is a message to a child."""
    try:
        return _to_child.decode(line)
    except _UNREADABLE as error:
        raise _refusal(line, error) from error


def decode_for_supervisor(line: bytes) -> ChildReport:
    """Raises ControlError unless ``line`` is a message to the supervisor."""
    try:
        return _to_supervisor.decode(line)
    except _UNREADABLE as error:
        raise _refusal(line, error) from error


def _refusal(line: bytes, error: Exception) -> ControlError:
    return ControlError(f"not a control message: {error}: {line[:200]!r}")
