"""Messages between the supervisor and its child processes, and their framing as JSON lines.

One Unix stream socketpair per child carries JSON lines, each a tagged struct of this module.

===================  =======================  ==========  ==================================================
message              sender                   receiver    answer
===================  =======================  ==========  ==================================================
Launch               supervisor               any child   Progress until Ready or ProcessFailed
GatewayLaunch        supervisor               gateway     the same
AcceptConnections    supervisor               API server  none
AnnounceDrain        supervisor               API server  none; Drain follows
Drain                supervisor               API server  none; the process exits with 0 when it is idle
Stop                 supervisor               any child   none; the process exits with 0
EnginesDraining      supervisor               API server  none
DesiredStates        supervisor               API server  StatesReport
EnableThroughputLog  supervisor               API server  none
ApiKeys              supervisor               API server  none
SupervisorMetrics    supervisor               API server  none
Progress             child                    supervisor  none
Ready                child                    supervisor  none
ProcessFailed        child                    supervisor  none; the process exits
Heartbeat            any child                supervisor  none
DrainEngine          API server               supervisor  EnginesDraining, to every API server
ChangeState          API server               supervisor  DesiredStates, to every API server
StatesReport         API server               supervisor  DesiredStates, when that changes them
===================  =======================  ==========  ==================================================

AcceptConnections, AnnounceDrain, Drain and ApiKeys go to the workers of a gateway as to API servers; Drain
also goes to the engines of a host without an API server. Ready, failed and dead (end of file, exit
code) are three different signals. A child that reads end of file has lost its supervisor and exits at once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.config.gateway import GatewayConfig
from penstock.config.serve import ServeConfig
from penstock.wire.curve import ClusterKey
from penstock.wire.messages import MAX_IDEMPOTENCY_KEY_LENGTH, DesiredState
from penstock.wire.scripted import ScriptedRule

# Maximum bytes of a line, newline included. The largest message, Launch, takes about 1 kB and
# the rules of a script.
MAX_LINE_BYTES = 1 << 20
MAX_FAILURE_CHARACTERS = 4096
"""Longest reason that a child reports; the rest is cut off."""
MAX_STATES = 64
"""Desired states that there may be; all of them travel in one line."""
MAX_STATE_BYTES = 256 << 10
"""Maximum size of a change's line: a thousand adapters with paths of usual length."""
MAX_CHANGES = 64
"""Changes of a state that are remembered, with their keys."""
MAX_CALL_CHARS = 32
MAX_ASKED_CHARS = 512
"""Characters of what a change asks for, in words."""
MAX_ERROR_CHARS = 2048
"""Characters of the reason why a change is rolled back."""
HEARTBEAT_INTERVAL_S = 1.0
"""Minimum time between two heartbeats of a process."""

Role = Literal["api-server", "engine", "coordinator", "gateway", "media-worker"]
SERVER_ROLES: tuple[Role, ...] = ("api-server", "gateway")
"""Roles of processes that have clients: they are drained at the end, and replaced one by one."""
Info = dict[str, str | int | float | bool]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""A number, a version or a revision that a child reports."""


class ControlError(ValueError):
    """A line that is too long, or not a message of this channel."""


# -- messages ------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages. Fields are only ever appended, with a default."""


class Launch(_Message, frozen=True, tag="launch"):
    """Role and configuration of a child. Sent once, before anything else."""

    role: Literal["api-server", "engine", "coordinator", "media-worker"]
    index: int
    """Index of this process within its role, from 0. An API server that replaces another has the same index
    modulo api_server_count."""
    epoch: int
    """Earlier processes of this role and index: (role, index, epoch) is unique per run of the supervisor."""
    config: ServeConfig
    run_dir: str
    """Absolute path of the directory of the sockets between processes, mode 0700."""
    model_dir: str
    """Directory with config.json and weights; for an engine without a model, one with only a tokenizer."""
    tokenizer_dir: str
    """Directory with tokenizer.json: model_dir, unless --tokenizer names another or it was converted."""
    served_model_names: list[str]
    """Names that clients may use for the model; replies report the first one. Never empty."""
    api_server_count: int
    engine_count: int
    coordinator: str | None = None
    """Address of the coordinator; None in a fleet of one API server and one engine, which has none."""
    local_ranks: list[int] = []
    """Ranks of the engines on the API servers' host, which listen in the run directory. Others listen on tcp://,
    and API servers get their addresses from the coordinator."""
    incarnation: int = 0
    """Number of the supervisor's run, see penstock.wire.sockets.new_incarnation."""
    traits: dict[str, str] = {}
    """Properties that all engines must share, as far as they are known before the start, by name."""
    cluster_key: str | None = None
    """The fleet's secret key, for tcp:// connections."""
    listen_fd: int | None = None
    """Inherited listening socket, TCP or Unix; only for a single API server, which accepts by itself."""
    given: list[str] = []
    """Fields of config that the operator has set, by any source; the others hold their defaults."""
    handover_fd: int | None = None
    """Inherited socket over which one of several API servers receives connections, see
    :mod:`penstock.wire.handover`."""
    restarts: int = 0
    """Restarts of this process after it died; ``epoch`` also counts processes of the same index that were
    replaced."""
    script: list[ScriptedRule] | None = None
    """Rules of --synthetic-script, for engines."""
    response_store_dir: str | None = None
    """Absolute path of the directory of stored responses; None: there is no store."""
    desired: DesiredStates | None = None
    """What settled states there are, for API servers and engines."""
    draft_dir: str | None = None
    """Directory of the draft model, for engines; None: there is none."""
    weights_dir: str | None = None
    """Absolute path of the directory of weights that trainers broadcast, for API servers; None: the run
    directory."""
    seal_key: bytes = b""
    """The secret that seals summaries, for API servers; empty: each has its own."""
    media_dir: str | None = None
    """Absolute path of the host's store of pictures' pages; None: there is none, and no picture is taken."""
    media_workers: int = 0
    """Media workers of this host, whose sockets are in the run directory."""
    media_capacity: int = 0
    """Bytes that the store holds at most."""
    media_arguments: list[str] = []
    """What follows ``vllm serve`` in the command of vLLM's engines, for media workers that prepare
    pictures by its processor; empty: other engines run."""

    @property
    def name(self) -> str:
        """Role and index, such as "engine 3"."""
        return f"{self.role} {self.index}"

    @property
    def instance(self) -> str:
        """A name of this process that no process of any server has had."""
        return f"{self.role}-{self.index}-{self.epoch}-{self.incarnation:x}"

    @property
    def own_ranks(self) -> Collection[int]:
        """Ranks of the engines that this supervisor starts."""
        on_ray = self.config.data_parallel_backend == "ray"
        return range(self.engine_count) if on_ray else self.local_ranks

    @property
    def key(self) -> ClusterKey | None:
        return None if self.cluster_key is None else ClusterKey(self.cluster_key)


class GatewayLaunch(_Message, frozen=True, tag="launch-gateway"):
    """Configuration of a worker of a gateway. Sent once, before anything else. Fields without a comment are
    those of :class:`Launch`."""

    role: Literal["gateway"]
    index: int
    epoch: int
    config: GatewayConfig
    run_dir: str
    worker_count: int
    """Workers that serve at a time."""
    keeper_fd: int
    """The worker's end of the socket to the keeper of what the workers share."""
    scoreboard_slot: int
    """The worker's slot of the scoreboard, which the workers map."""
    restarts: int = 0
    listen_fd: int | None = None
    handover_fd: int | None = None

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


class AcceptConnections(_Message, frozen=True, tag="accept"):
    """Take connections from here on. Sent to an API server that is ready, at the first start when every child
    of this host is: until then the supervisor itself answers clients."""


class AnnounceDrain(_Message, frozen=True, tag="announce-drain"):
    """Serve on, but answer /ready with 503, so that load balancers send their requests elsewhere."""


class Drain(_Message, frozen=True, tag="drain"):
    """Finish running requests, then exit with 0.

    To API servers, and to the engines of a host that has none. New requests are refused. With ``replaced``
    the API server leaves new connections to the others and serves those it has until they end. Stop follows
    when that takes too long.
    """

    replaced: bool = False


class Stop(_Message, frozen=True, tag="stop"):
    """End running requests with an error to their clients, release everything, exit with 0.

    A child that has not exited 5 seconds later is killed.
    """


class Progress(_Message, frozen=True, tag="progress"):
    """Startup progress. Resets the startup timeout."""

    text: str
    fraction: float | None = None
    """Completed share of the work, 0 to 1; None if unknown."""


class Ready(_Message, frozen=True, tag="ready"):
    """The process can serve. ``info`` is shown to the operator: device, cache size and so on."""

    info: Info = {}


class ProcessFailed(_Message, frozen=True, tag="failed"):
    """The process exits because of an error. ``message`` is for the operator and has no traceback."""

    message: str
    fatal: bool
    """A restart would fail the same way (missing file, unsuitable option), so there is none."""
    usage: bool = False
    """The options cannot be run, which is the exit code of the whole server if it is still starting."""


class Heartbeat(_Message, frozen=True, tag="beat"):
    """The process's loop runs: sent between steps and while idle, see HEARTBEAT_INTERVAL_S."""


class DrainEngine(_Message, frozen=True, tag="drain-engine"):
    """Stop giving engine ``rank`` new streams (``draining``), or give it streams again."""

    rank: Count
    draining: bool


class EnginesDraining(_Message, frozen=True, tag="engines-draining"):
    """All engines that get no new streams."""

    ranks: list[int]


class ChangeRecord(msgspec.Struct, array_like=True, frozen=True):
    """A change of a state, and what became of it."""

    key: str
    """Idempotency key."""
    asked: str
    """What it asked for, in words."""
    generation: int
    """The generation that it has set; with ``settled``, that of its final value."""
    settled: bool = False
    """Everybody has observed it. Otherwise it is pending, unless there is an error."""
    error: str = ""
    """Why it was rolled back."""
    rank: int | None = None
    """The engine that could not apply it."""
    call: str = ""
    """Of ChangeState: whose change it is."""


class DesiredStates(_Message, frozen=True, tag="desired-states"):
    """All states that ever changed. API servers have the engines apply them."""

    states: list[DesiredState]
    changes: dict[str, list[ChangeRecord]]
    """The latest changes of each state, by name."""


class ChangeState(_Message, frozen=True, tag="change-state"):
    """Set a state, unless it has changed since generation ``base`` or another change is pending. Either way
    DesiredStates is the answer."""

    name: str
    key: Annotated[str, Meta(max_length=MAX_IDEMPOTENCY_KEY_LENGTH)]
    asked: Annotated[str, Meta(max_length=MAX_ASKED_CHARS)]
    """What is asked for, in words: the same key again stands for the same."""
    base: Count
    """0 for a state that never changed."""
    stages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Values, the final one last. Everybody must have observed one before the next is set."""
    initial: list[dict[str, Any]] = []
    """Such values for what there is before the first change of the state, in case that is rolled back; empty:
    the default alone."""
    call: Annotated[str, Meta(max_length=MAX_CALL_CHARS)] = ""
    """The call that asks: of several at the same time with one key, one makes the change."""


class StateReport(msgspec.Struct, array_like=True, frozen=True):
    """What an API server, with all engines that are connected to it, has reached of a state."""

    generation: Count
    error: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] = ""
    """Empty: it is observed. Otherwise why it is not; it is rolled back, unless it holds already."""
    rank: int | None = None
    """The engine that could not apply it."""

    @property
    def reason(self) -> str:
        """The error, with the engine that has it."""
        return self.error if self.rank is None else f"engine {self.rank}: {self.error}"


class StatesReport(_Message, frozen=True, tag="states-report"):
    """What the API server has reached of each state, by name."""

    states: dict[str, StateReport]


class EnableThroughputLog(_Message, frozen=True, tag="speak"):
    """Write the throughput log from here on. Goes to one API server of the fleet."""


class ApiKeys(_Message, frozen=True, tag="api-keys"):
    """Requests need these keys from here on, also on connections that are open; running ones go on."""

    api_key: list[str]
    admin_api_key: list[str]


class SupervisorMetrics(_Message, frozen=True, tag="supervisor-metrics"):
    """The supervisor's metrics, about once a second."""

    snapshot: bytes
    """An encoded penstock.metrics.snapshot.Snapshot."""


SupervisorCommand = (
    AcceptConnections
    | AnnounceDrain
    | Drain
    | Stop
    | EnginesDraining
    | DesiredStates
    | EnableThroughputLog
    | SupervisorMetrics
    | ApiKeys
)
ChildReport = Progress | Ready | ProcessFailed | Heartbeat | DrainEngine | ChangeState | StatesReport

AnyLaunch = Launch | GatewayLaunch

_to_child: msgspec.json.Decoder[AnyLaunch | SupervisorCommand] = msgspec.json.Decoder(
    AnyLaunch | SupervisorCommand
)
_to_supervisor: msgspec.json.Decoder[ChildReport] = msgspec.json.Decoder(ChildReport)

# msgspec raises UnicodeDecodeError for a string that is not UTF-8, RecursionError for lists within lists.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


# -- lines, without I/O --------------------------------------------------------------------------------


def encode(message: AnyLaunch | SupervisorCommand | ChildReport) -> bytes:
    """One line, newline included. Raises ControlError when it would exceed :data:`MAX_LINE_BYTES`."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ControlError(
            f"control message {type(message).__name__} has {len(line)} bytes, at most {MAX_LINE_BYTES}"
        )
    return line


class LineBuffer:
    """Splits a byte stream into lines."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without newlines. Raises ControlError for a line too long."""
        if b"\n" not in data and len(self._partial) + len(data) < MAX_LINE_BYTES:
            self._partial += data
            return []
        self._partial += data
        lines = self._partial.split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) >= MAX_LINE_BYTES or any(len(line) >= MAX_LINE_BYTES for line in lines):
            raise ControlError(f"control message of more than {MAX_LINE_BYTES} bytes")
        return [bytes(line) for line in lines]


def decode_for_child(line: bytes) -> AnyLaunch | SupervisorCommand:
    """Raises ControlError unless ``line`` is a message to a child."""
    try:
        return _to_child.decode(line)
    except _UNREADABLE as error:
        raise _refusal(line, error) from error


def decode_for_supervisor(line: bytes) -> ChildReport:
    """Raises ControlError unless ``line`` is a message to the supervisor."""
    try:
        report = _to_supervisor.decode(line)
    except _UNREADABLE as error:
        raise _refusal(line, error) from error
    if isinstance(report, ChangeState) and len(line) > MAX_STATE_BYTES:
        raise ControlError(f"a change of a state of {len(line)} bytes, at most {MAX_STATE_BYTES}")
    return report


def _refusal(line: bytes, error: Exception) -> ControlError:
    return ControlError(f"not a control message: {error}: {line[:200]!r}")
