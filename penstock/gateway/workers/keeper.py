"""The keeper of what the workers of a gateway share: a thread of their supervisor.

Each worker has a socket to it, see :mod:`letters`. It keeps the budgets, the control calls, the drained
endpoints and the metrics of all, says which workers run, and passes on what they tell each other. A worker
that does not read costs the others nothing: its letters wait, then are dropped. The end of its socket is the
end of the worker, also of one that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

import msgspec

from penstock.gateway.workers.budget_state import BudgetState
from penstock.gateway.workers.drained_endpoints import DrainKeeper
from penstock.gateway.workers.keeper_link import HELLO, MEMBERS, Members
from penstock.gateway.workers.kept_metrics import MetricsKeeper
from penstock.gateway.workers.letters import Letter, LetterStream, WorkerName
from penstock.gateway.workers.shared_budgets import BudgetKeeper
from penstock.gateway.workers.shared_controls import ControlKeeper

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Keeper:
    """Use it as a context: the thread runs meanwhile. ``clock`` gives seconds.

    A separate thread, because the supervisor's main thread may block while it starts processes or writes to
    the log.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, budget_state_file: str | None = None
    ) -> None:
        """Raises ConfigError for a file that has no budgets."""
        self._loop = asyncio.new_event_loop()
        self._streams: dict[WorkerName, LetterStream] = {}
        self._present: set[WorkerName] = set()
        """Workers that take letters."""
        self._ended: dict[int, int] = {}
        """The latest epoch that has ended by the number of a worker."""
        self._budgets = BudgetKeeper(self._send, clock)
        self._budget_state = None
        if budget_state_file is not None:
            self._budget_state = BudgetState(budget_state_file, self._budgets.store)
        self._metrics = MetricsKeeper(self._send)
        self._controls = ControlKeeper(self._send, self._present)
        self._drains = DrainKeeper(self._send, self._present)
        self._handlers: dict[str, Callable[[WorkerName, bytes], None]] = {
            HELLO: self._on_hello,
            **self._budgets.handlers,
            **self._metrics.handlers,
            **self._controls.handlers,
            **self._drains.handlers,
        }
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def add_worker(self, worker: WorkerName) -> socket.socket:
        """Add a worker that is about to start. Returns its end of the socket, to be closed here once it has
        started. Raises OSError."""
        ours, theirs = socket.socketpair()
        asyncio.run_coroutine_threadsafe(self._connect(worker, ours), self._loop).result()
        return theirs

    # -- in the thread

    def _run(self) -> None:
        saving = None if self._budget_state is None else self._loop.create_task(self._budget_state.run())
        self._loop.run_forever()
        for stream in self._streams.values():
            stream.transport.abort()
        self._loop.run_until_complete(asyncio.sleep(0))
        if saving is not None and self._budget_state is not None:
            saving.cancel()
            self._loop.run_until_complete(asyncio.gather(saving, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._budget_state.save()
        self._loop.close()

    async def _connect(self, worker: WorkerName, sock: socket.socket) -> None:
        stream = LetterStream(partial(self._take_letter, worker), partial(self._forget, worker))
        self._streams[worker] = stream
        await self._loop.create_unix_connection(lambda: stream, sock=sock)

    def _take_letter(self, caller: WorkerName, letter: Letter) -> None:
        if (handler := self._handlers.get(letter.topic)) is not None:
            handler(caller, letter.data)
        elif letter.peer is None:
            for worker in self._present - {caller}:
                self._send(worker, Letter(letter.topic, letter.data, caller))
        elif letter.peer in self._streams:
            self._send(letter.peer, Letter(letter.topic, letter.data, caller))
        else:  # it has ended
            self._send(caller, Letter(letter.topic, letter.data))

    def _send(self, worker: WorkerName, letter: Letter) -> bool:
        """Return False for a letter that is dropped."""
        return worker in self._streams and self._streams[worker].send(letter)

    # -- which workers run

    def _on_hello(self, caller: WorkerName, data: bytes) -> None:
        self._present.add(caller)
        self._tell_members()
        self._drains.greet(caller)  # before what the worker waits for
        self._controls.greet(caller)

    def _forget(self, worker: WorkerName) -> None:
        """The worker has ended."""
        del self._streams[worker]
        self._present.discard(worker)
        self._ended[worker.number] = max(worker.epoch, self._ended.get(worker.number, 0))
        self._budgets.forget(worker)
        self._metrics.forget(worker)
        self._controls.forget(worker)
        self._drains.forget(worker)
        self._tell_members()

    def _tell_members(self) -> None:
        first_epochs = {number: epoch + 1 for number, epoch in self._ended.items()}
        for each in sorted(self._streams, reverse=True):
            first_epochs[each.number] = each.epoch
        letter = Letter(MEMBERS, _encode(Members(sorted(self._present), first_epochs)))
        for worker in self._present:
            self._send(worker, letter)
