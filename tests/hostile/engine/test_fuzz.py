"""One hostile API server among honest ones, and a real engine process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq

from penstock.wire.control import Stop
from penstock.wire.sockets import engine_address, server_identity
from tests.engine.loop.test_process_end import Child
from tests.engine.loops import ENDLESS
from tests.engine.peers import ApiServer
from tests.engine.support import submit
from tests.hostile.engine.fuzzer import Fuzzer

ROUND = 50
"""Messages between two looks at the honest API servers."""
MEMORY_GROWTH = 64 << 20


@pytest.fixture
def hostile(run_dir: str, stack: ExitStack) -> zmq.Socket[bytes]:
    """A peer that says what it likes; nobody reads what it is told."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    socket = context.socket(zmq.DEALER)
    stack.callback(socket.close)
    socket.setsockopt(zmq.IDENTITY, server_identity(7, 0))
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(engine_address(run_dir, 0))
    return socket


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 12), *(pytest.param(seed, 200, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
def test_damaged_messages_disturb_nobody_else(
    model_dir: Path,
    run_dir: str,
    stack: ExitStack,
    connect: Callable[..., ApiServer],
    hostile: zmq.Socket[bytes],
    seed: int,
    rounds: int,
) -> None:
    child = Child(model_dir, run_dir, stack, synthetic_step_ms=1, max_model_len=100_000, max_num_seqs=4096)
    honest, other = connect(0), connect(1)
    honest.send(submit(0, ENDLESS))
    other.send(submit(0, ENDLESS, seed=1))
    fuzzer = Fuzzer(seed, 7)
    resident = psutil.Process(child.process.pid).memory_info
    before = 0
    for turn in range(rounds):
        for _ in range(ROUND):
            hostile.send_multipart(fuzzer.parts(), zmq.NOBLOCK)
        for peer in (honest, other):
            peer.send(submit(1 + turn, 10))
            peer.read_ends(1 + turn)
        while hostile.poll(0):
            hostile.recv_multipart()
        if turn == rounds // 4:
            before = resident().rss
    assert resident().rss - before < MEMORY_GROWTH
    for peer in (honest, other):
        peer.ping()
        assert not peer.received.ended(0)
        assert {len(tokens) for stream, tokens in peer.received.tokens.items() if stream} == {10}
        assert (peer.received.failed, peer.received.others) == ({}, [])
    child.channel.send(Stop())
    code, errors = child.end()
    assert code == 0, errors
    lines = errors.splitlines()
    assert len(lines) <= 1 + rounds // 200, "one line about the hostile peer and minute"
    assert lines[0].startswith("api-server 7 "), errors
    assert "b'" not in errors
