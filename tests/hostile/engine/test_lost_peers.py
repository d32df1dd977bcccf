"""API servers that vanish while their messages wait: the engine loop with a scripted socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.process import EngineLoop
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.control import SupervisorCommand
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    Abort,
    Disconnect,
    GoAway,
    Hello,
    RpcCall,
    Welcome,
    encode,
)
from penstock.wire.sockets import PeerGone, server_identity
from tests.engine.support import Received, submit


class ScriptedSocket:
    """Hands out prepared messages; sends to peers in ``gone`` raise PeerGone."""

    address = "inproc://scripted"
    disconnects = 0

    def __init__(self) -> None:
        self.incoming: deque[tuple[bytes, list[bytes]]] = deque()
        self.gone: set[bytes] = set()
        self.full: set[bytes] = set()
        self.received: dict[bytes, Received] = {}

    def says(self, identity: bytes, *messages: Any) -> None:
        self.incoming.append((identity, [encode(message) for message in messages]))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        if identity in self.gone:
            raise PeerGone("gone")
        if identity in self.full:
            return False
        self.received.setdefault(identity, Received()).parts(parts)
        return True

    def wait(self, timeout_s: float | None, also: int | None = None) -> bool:
        return bool(self.incoming)


class NoCommands:
    def receive(self) -> Sequence[SupervisorCommand]:
        return []

    def heartbeat(self) -> None:
        pass

    def fileno(self) -> int:
        return 0


class Rig:
    """An engine loop that is driven turn by turn."""

    def __init__(self, model_dir: Path, **options: Any) -> None:
        config = ServeConfig(engine="synthetic", **{"synthetic_step_ms": 0, "max_model_len": 4096, **options})
        self.engine = SyntheticEngine(config, str(model_dir))
        self.socket = ScriptedSocket()
        self.loop = EngineLoop(self.engine, self.socket, EngineIdentity(0))  # type: ignore[arg-type]

    def hello(self, server: int, connection: int = 0, incarnation: int = 0) -> bytes:
        identity = server_identity(server, 0, incarnation, connection)
        self.socket.says(identity, Hello(ENGINE_PROTOCOL_VERSION, server, 0, incarnation, connection))
        return identity

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.run_once(NoCommands())  # type: ignore[arg-type]


@pytest.fixture
def rig(model_dir: Path) -> Rig:
    return Rig(model_dir, max_num_seqs=1, max_num_queued_reqs=1)


def test_an_api_server_that_is_gone_when_its_submit_is_refused(rig: Rig) -> None:
    """Refusing the third Submit finds the connection broken; more of its messages wait behind."""
    zero, one = rig.hello(0), rig.hello(1)
    rig.socket.says(one, submit(1, 40))
    rig.turns()
    rig.socket.gone.add(zero)
    rig.socket.says(zero, *(submit(stream, 40) for stream in range(5)))
    rig.socket.says(zero, submit(7, 40), Abort([1]), RpcCall(1, "reset_prefix_cache"), Disconnect())
    rig.turns(60)
    assert len(rig.socket.received[one].tokens[1]) == 40
    assert rig.socket.received[one].ended(1)
    assert not rig.engine.has_work()


def test_a_successor_is_served_while_messages_of_its_predecessor_wait(rig: Rig) -> None:
    zero = rig.hello(0)
    rig.turns()
    rig.socket.gone.add(zero)
    rig.socket.says(zero, *(submit(stream, 40) for stream in range(5)))
    after = rig.hello(0, connection=1)
    rig.socket.says(after, submit(3, 10))
    rig.socket.says(zero, submit(3, 40), Abort([3]))
    rig.turns(60)
    received = rig.socket.received[after]
    assert [type(message) for message in received.others] == [Welcome]
    assert len(received.tokens[3]) == 10
    assert not rig.engine.has_work()


def test_messages_of_a_peer_that_is_gone_are_not_worth_a_line(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    zero = rig.hello(0)
    rig.turns()
    rig.socket.says(zero, Disconnect())
    rig.turns()
    rig.socket.gone.add(zero)
    rig.socket.says(zero, Disconnect())
    rig.socket.says(zero, submit(1), Abort([1]))
    rig.turns()
    assert caplog.text == ""


def test_an_api_server_whose_number_is_taken_is_told(rig: Rig) -> None:
    """Also when its queue is full at that moment: it would wait for its streams for ever."""
    first = rig.hello(0, connection=0)
    rig.socket.says(first, submit(1, 4000))
    rig.turns(3)
    rig.socket.full.add(first)
    thief = rig.hello(0, connection=1)
    rig.turns(3)
    assert rig.socket.received[first].others[1:] == []
    rig.socket.full.clear()
    rig.turns()
    (farewell,) = rig.socket.received[first].others[1:]
    assert isinstance(farewell, GoAway)
    assert "API server 0" in farewell.reason
    assert [type(message) for message in rig.socket.received[thief].others] == [Welcome]
    assert not rig.engine.has_work()
