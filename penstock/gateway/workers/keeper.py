"""The keeper of what the workers of a gateway share: a thread of their supervisor.

Each worker has a socket to it, see :mod:`letters`. It keeps the budgets and the metrics of all, says which
workers run, and passes on what they tell each other. A worker that does not read costs the others nothing:
its letters wait, then are dropped. The end of its socket is the end of the worker, also of one that was
killed.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec

from penstock.gateway.workers.keeper_link import HELLO, MEMBERS, Members
from penstock.gateway.workers.kept_metrics import MetricsKeeper
from penstock.gateway.workers.letters import Letter, LetterStream, StreamEnded, WorkerName
from penstock.gateway.workers.shared_budgets import BudgetKeeper
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_complain = RateLimitedLog(log)
_encode = msgspec.msgpack.Encoder().encode


class Keeper:
    """Use it as a context: the thread runs meanwhile. ``clock`` gives seconds.

    A separate thread, because the supervisor's main thread may block while it starts processes or writes to
    the log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._added: deque[tuple[WorkerName, LetterStream]] = deque()
        """Workers that the main thread has added."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._streams: dict[WorkerName, LetterStream] = {}
        self._present: set[WorkerName] = set()
        """Workers that take letters."""
        self._ended: dict[int, int] = {}
        """The latest epoch that has ended by the number of a worker."""
        self._budgets = BudgetKeeper(self._send, clock)
        self._metrics = MetricsKeeper(self._send, self._present, clock)
        self._handlers: dict[str, Callable[[WorkerName, bytes], None]] = {
            HELLO: self._on_hello,
            **self._budgets.handlers,
            **self._metrics.handlers,
        }
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._wake_up()
        self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        for _, stream in self._added:
            stream.close()

    def add(self, worker: WorkerName) -> socket.socket:
        """Add a worker that is about to start. Returns its end of the socket, to be closed here once it has
        started. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._added.append((worker, LetterStream(ours)))
        self._wake_up()
        return theirs

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of bytes that wake it up
            self._wake.send(b"x")

    # -- in the thread

    def _run(self) -> None:
        try:
            while not self._ending:
                self._run_once()
        except Exception:
            log.exception("the workers of the gateway share nothing any more")
        finally:
            for stream in self._streams.values():
                stream.close()

    def _run_once(self) -> None:
        for key, events in self._selector.select(self._metrics.wait_s()):
            if key.data is None:
                self._woken.recv(4096)
                self._watch_added()
            elif key.data in self._streams:  # it may have ended since
                self._serve(key.data, events)
        self._metrics.answer_late()

    def _watch_added(self) -> None:
        while self._added:
            worker, stream = self._added.popleft()
            self._streams[worker] = stream
            self._selector.register(stream, selectors.EVENT_READ, worker)

    def _serve(self, worker: WorkerName, events: int) -> None:
        stream = self._streams[worker]
        if events & selectors.EVENT_WRITE:
            stream.flush()
            self._update_events(worker, stream)
        if events & selectors.EVENT_READ:
            try:
                letters = stream.receive()
            except StreamEnded as error:
                log.debug("worker %s: %s", worker, error)
                self._forget(worker)
                return
            for letter in letters:
                self._take_letter(worker, letter)

    def _take_letter(self, sender: WorkerName, letter: Letter) -> None:
        if (handler := self._handlers.get(letter.topic)) is None:
            self._pass_on(sender, letter)
            return
        try:
            handler(sender, letter.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # of another version
            _complain(letter.topic, "what worker %s tells is not understood: %s", sender, error)

    def _pass_on(self, sender: WorkerName, letter: Letter) -> None:
        """What is for one worker that has ended comes back."""
        if letter.peer is not None and letter.peer not in self._streams:
            self._send(sender, Letter(letter.topic, letter.data))
            return
        for worker in self._present - {sender} if letter.peer is None else {letter.peer}:
            self._send(worker, Letter(letter.topic, letter.data, sender))

    def _send(self, worker: WorkerName, letter: Letter) -> bool:
        """Returns False for a letter that is dropped."""
        stream = self._streams.get(worker)
        if stream is None or not stream.send(letter):
            return False
        self._update_events(worker, stream)
        return True

    def _update_events(self, worker: WorkerName, stream: LetterStream) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.has_unsent else 0)
        if self._selector.get_key(stream).events != events:
            self._selector.modify(stream, events, worker)

    # -- which workers run

    def _on_hello(self, sender: WorkerName, data: bytes) -> None:
        self._present.add(sender)
        self._tell_members()

    def _forget(self, worker: WorkerName) -> None:
        """The worker has ended."""
        stream = self._streams.pop(worker)
        self._selector.unregister(stream)
        stream.close()
        self._present.discard(worker)
        self._ended[worker.number] = max(worker.epoch, self._ended.get(worker.number, 0))
        self._budgets.forget(worker)
        self._metrics.forget(worker)
        self._tell_members()

    def _tell_members(self) -> None:
        first_epochs = {number: epoch + 1 for number, epoch in self._ended.items()}
        for each in sorted(self._streams, reverse=True):
            first_epochs[each.number] = each.epoch
        letter = Letter(MEMBERS, _encode(Members(sorted(self._present), first_epochs)))
        for worker in self._present:
            self._send(worker, letter)
