"""A child process for tests: the real entry of a child, with a role that does as it is told.

``fake_child.py BEHAVIOUR FD``, where BEHAVIOUR is JSON: role → what it does in its first start, its second …,
the last one for good. A fake API server answers every connection with a line that says who it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from penstock.config.errors import ConfigError
from penstock.supervisor.children.child_main import main
from penstock.wire.channel import ControlChannel
from penstock.wire.control import (
    HEARTBEAT_INTERVAL_S,
    AcceptConnections,
    Drain,
    EnginesDraining,
    Launch,
    Role,
    Stop,
)
from penstock.wire.handover import HandoverReceiver

log = logging.getLogger("penstock.fake")


def serve(control: ControlChannel, launch: Launch, *, deaf: bool = False) -> int:
    """Until Drain (an API server) or Stop; ``deaf``: passes over Drain, as if its streams never ended."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    listener = taker = None
    if launch.listen_fd is not None:
        listener = socket.socket(fileno=launch.listen_fd)
    if launch.handover_fd is not None:
        taker = HandoverReceiver(launch.handover_fd)
    if launch.desired is not None:
        log.info("begins with %s", msgspec.json.encode(launch.desired).decode())
    control.ready({"device": "fake", "pid": os.getpid()} if launch.role == "engine" else {})
    while True:
        for key, _ in selector.select(HEARTBEAT_INTERVAL_S):
            if listener is not None and key.fileobj is listener:
                with contextlib.suppress(BlockingIOError):  # another API server was faster
                    answer(listener.accept()[0], launch)
                continue
            if taker is not None and key.fileobj is taker:
                for connection in taker.receive():
                    answer(connection, launch)
                taker.report(0, accepts=True)
                continue
            for order in control.receive():
                log.info("got %s", type(order).__name__)
                if isinstance(order, AcceptConnections) and listener is not None:
                    selector.register(listener, selectors.EVENT_READ)
                if isinstance(order, AcceptConnections) and taker is not None:
                    selector.register(taker, selectors.EVENT_READ)
                    taker.report(0, accepts=True)
                if isinstance(order, Stop) or (isinstance(order, Drain) and not deaf):
                    return 0
        control.heartbeat()


def answer(connection: socket.socket, launch: Launch) -> None:
    with connection:
        connection.sendall(f"{launch.role} {launch.index} {launch.epoch} {os.getpid()}\n".encode())


def fatal(control: ControlChannel, launch: Launch) -> int:
    control.failed("no such model", fatal=True)
    return 7


def raising(control: ControlChannel, launch: Launch) -> int:
    raise ValueError("the weights are cursed")


def refusing(control: ControlChannel, launch: Launch) -> int:
    raise ConfigError("--threads 9: too many")


def raising_late(control: ControlChannel, launch: Launch) -> int:
    serve(control, launch)
    raise ValueError("the weights are cursed")


def dying(control: ControlChannel, launch: Launch) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hanging(control: ControlChannel, launch: Launch) -> int:
    """A start that never ends and does not listen, as one that loads a model."""
    control.progress("loading weights", 0.5)
    while True:
        signal.pause()


def slow(control: ControlChannel, launch: Launch) -> int:
    control.progress("loading weights", 0.5)
    return serve(control, launch)


def until_told(control: ControlChannel, launch: Launch) -> int:
    """Loads until the run directory holds a file called go."""
    while not os.path.exists(os.path.join(launch.run_dir, "go")):
        control.progress("loading weights", 0.5)
        time.sleep(0.02)
    return serve(control, launch)


def ready_then(*parts: bytes, endless: bool = False) -> Callable[[ControlChannel, Launch], int]:
    """Serves, and writes these bytes to the control channel; ``endless``: for ever."""

    def run(control: ControlChannel, launch: Launch) -> int:
        control.ready()
        with socket.socket(fileno=os.dup(control.fileno())) as raw:
            raw.setblocking(True)
            while True:
                for part in parts:
                    raw.sendall(part)
                if not endless:
                    return serve(control, launch)

    return run


def toggling(control: ControlChannel, launch: Launch) -> int:
    """Serves, and has an engine drained and resumed without end, as fast as the supervisor answers."""
    control.ready()
    draining, toggled = False, 0
    while True:
        draining, toggled = not draining, toggled + 1
        control.drain_engine(0, draining=draining)
        if toggled % 700 == 0:
            log.info("has toggled an engine 700 times more")
        orders: list[object] = []
        while not any(isinstance(order, EnginesDraining) for order in orders):
            select.select([control], [], [], HEARTBEAT_INTERVAL_S)
            control.heartbeat()
            orders = [*control.receive()]
            if any(isinstance(order, Stop | Drain) for order in orders):
                return 0


def mute(control: ControlChannel, launch: Launch) -> int:
    """Ready, and never heard of again, nor does it read what it is told."""
    control.ready()
    while True:
        signal.pause()


def nested(depth: int) -> bytes:
    arguments = b'{"a":' * depth + b"1" + b"}" * depth
    return b'{"type":"propose-state","name":"a","key":"k","base":0,"arguments":%s}\n' % arguments


BEHAVIOURS: dict[str, Callable[[ControlChannel, Launch], int]] = {
    "serve": serve,
    "deaf": lambda control, launch: serve(control, launch, deaf=True),
    "fatal": fatal,
    "raise": raising,
    "refuse": refusing,
    "ready then raise": raising_late,
    "die": dying,
    "hang": hanging,
    "slow": slow,
    "until told": until_told,
    "not UTF-8": ready_then(b'{"type":"failed","message":"\xff","fatal":false}\n'),
    "too long": ready_then(b"x" * (2 << 20)),
    "too deep": ready_then(nested(100_000)),
    "text": ready_then(b"Loading weights...\n"),
    "no such engine": ready_then(b'{"type":"drain-engine","rank":-1,"draining":true}\n'),
    "flood": ready_then(b'{"type":"beat"}\n' * 4000, endless=True),
    "toggle": toggling,
    "mute": mute,
}


def role_main(role: Role) -> Callable[[ControlChannel], int]:
    starts = json.loads(sys.argv[1]).get(role, ["serve"])

    def run(control: ControlChannel) -> int:
        launch = control.launch
        log.info("runs as process %d in %s", os.getpid(), launch.run_dir)
        return BEHAVIOURS[starts[min(launch.epoch, len(starts) - 1)]](control, launch)

    return run


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[2]), role_main))
