"""Budgets that the workers of a gateway share: the worker with the least name keeps them for all.

The others ask it, with one datagram for all requests of a turn of the event loop; what it has no room for is
sent again. When it ends it hands its state to the next one. It also saves it in the run directory, once a
second while it changes: when it dies, its successor reads that, and what the last second took is forgotten.
What it was asked, its successor is asked again. While it lives it may be late, as all workers are in a burst:
it is waited for, and only one that hangs is done without, see
:class:`penstock.gateway.admission.budgets.Budgets`. Running requests of a worker that has died have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from time import perf_counter

import msgspec

from penstock.gateway.admission.budget_store import (
    BudgetStoreError,
    Charge,
    MemoryBudgetStore,
    Reservation,
    is_answered,
)
from penstock.gateway.requests.sender import Budget
from penstock.gateway.workers.exchange import Exchange, WorkerName

TIMEOUT_S = 5.0
"""Wait for the keeper: a process that lives on this host and does not answer for so long hangs."""
RETRY_S = 0.01
"""Time after which questions for which there was no room are sent again."""
MAX_UNSENT = 1 << 14
"""Questions that wait to be sent; beyond them the oldest are dropped, and their estimates stand."""
MAX_IN_DATAGRAM = 64
"""Questions or answers; one has at most 8 budgets and names of 64 characters, so about 600 bytes."""
MAX_STATE_IN_DATAGRAM = 256
"""Budgets, and running requests; either has about 100 bytes. A socket may take no more than 10 datagrams
until its owner reads them."""
SAVE_S = 1.0
"""Time between two writes of the state."""
SAVE_SHARE = 0.01
"""Share of its time that the keeper saves for, at most: a large state is saved less often."""
FILE = "budgets"
QUESTIONS, ANSWERS, STATE = "budget questions", "budget answers", "budget state"


class _Question(msgspec.Struct, array_like=True, frozen=True):
    number: int
    """0: nobody waits for an answer, as the request has ended."""
    client: str
    request: str
    charges: list[tuple[str, int, float, int]]
    """Name, amount and period of each budget, and what is charged."""
    most_concurrent: int | None
    counted: bool


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    number: int
    debts_s: list[float]
    exceeded: int | None
    too_many: bool
    wait_s: float


class _State(msgspec.Struct, array_like=True, frozen=True):
    full_at: list[tuple[str, str, float]]
    running: list[tuple[str, str]]


_encode = msgspec.msgpack.Encoder().encode
_questions = msgspec.msgpack.Decoder(list[_Question])
_answers = msgspec.msgpack.Decoder(list[_Answer])
_state = msgspec.msgpack.Decoder(_State)


class SharedBudgetStore:
    """One worker's view of the budgets. ``clock`` gives seconds, the same in all workers."""

    def __init__(self, exchange: Exchange, clock: Callable[[], float], timeout_s: float = TIMEOUT_S) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._memory = MemoryBudgetStore(clock)
        self._numbers = count(1)
        self._asked: dict[int, tuple[_Question, asyncio.Future[Reservation]]] = {}
        self._unsent: deque[_Question] = deque(maxlen=MAX_UNSENT)
        self._path = Path(exchange.run_dir, _file_of(exchange.own))
        self._unfinished = Path(exchange.run_dir, f"unfinished-{_file_of(exchange.own)}")
        self._saving: asyncio.TimerHandle | None = None
        self._save_at = 0.0
        """The earliest time of the next write, of the event loop."""
        exchange.on(QUESTIONS, self._on_questions)
        exchange.on(ANSWERS, self._on_answers)
        exchange.on(STATE, self._on_state)
        exchange.on_joined.append(self._on_joined)
        exchange.on_gone.append(self._on_gone)

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        name = self._name(request)
        if self._keeper() is None:
            self._save_soon()
            return self._memory.reserve_now(client, name, charges, most_concurrent)
        number = next(self._numbers)
        answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        question = _Question(number, client, name, _plain(charges), most_concurrent, counted=False)
        self._asked[number] = question, answer
        self._ask(question)
        try:
            if not await is_answered(answer, self._timeout_s):
                raise BudgetStoreError("the worker that keeps the budgets is silent")
            return answer.result()
        except (BudgetStoreError, asyncio.CancelledError):
            if question in self._unsent:
                self._unsent.remove(question)
            elif most_concurrent is not None:  # it may be granted: its charges stand, but it does not run
                self.settle(client, request, (), counted=True)
            raise
        finally:
            del self._asked[number]

    def settle(self, client: str, request: str, charges: Sequence[Charge], *, counted: bool) -> None:
        name = self._name(request)
        if self._keeper() is None:
            self._save_soon()
            self._memory.settle(client, name, charges, counted=counted)
        else:
            self._ask(_Question(0, client, name, _plain(charges), None, counted))

    async def close(self) -> None:
        if self._exchange.siblings and self._keeper() is None:
            self._hand_on(min(self._exchange.siblings))
        self._stop_saving()

    def _on_joined(self, sibling: WorkerName) -> None:
        if sibling == self._keeper() and not any(
            each < self._exchange.own for each in self._exchange.siblings - {sibling}
        ):
            self._hand_on(sibling)

    def _on_gone(self, sibling: WorkerName) -> None:
        if self._keeper() is None:
            self._take_over()
        self._memory.end_requests(_prefix(sibling))
        if all(sibling < each for each in (*self._exchange.siblings, self._exchange.own)):  # the keeper
            waiting = {each.number for each in self._unsent}
            for question, answer in self._asked.values():
                if not answer.done() and question.number not in waiting:
                    self._ask(question)

    def _take_over(self) -> None:
        """Read what keepers have saved that died. One worker gets it, by the new name."""
        alive = {_file_of(each) for each in (*self._exchange.siblings, self._exchange.own)}
        for path in self._path.parent.glob(f"{FILE}.*"):
            if path.name not in alive:
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    path.rename(self._unfinished)
                    self._on_state(self._exchange.own, self._unfinished.read_bytes())

    # -- the file

    def _save_soon(self) -> None:
        """The state changes."""
        if self._saving is None:
            loop = asyncio.get_running_loop()
            self._saving = loop.call_at(max(self._save_at, loop.time()), self._save)

    def _save(self) -> None:
        self._saving = None
        began = perf_counter()
        self.save()
        wait_s = max(SAVE_S, (perf_counter() - began) / SAVE_SHARE)
        self._save_at = asyncio.get_running_loop().time() + wait_s

    def save(self) -> None:
        """Write the state, in the place of what was saved before. Without room for it, that is lost."""
        with contextlib.suppress(OSError):
            self._unfinished.write_bytes(_encode(_State(*self._memory.state())))
            self._unfinished.replace(self._path)

    def _stop_saving(self) -> None:
        """Another worker is the keeper, and has the state, or none is left."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        for path in (self._path, self._unfinished):
            path.unlink(missing_ok=True)

    def _hand_on(self, keeper: WorkerName) -> None:
        """This worker was the keeper."""
        self._stop_saving()
        full_at, running = self._memory.take_state()
        for start in range(0, max(len(full_at), len(running)), MAX_STATE_IN_DATAGRAM):
            part = slice(start, start + MAX_STATE_IN_DATAGRAM)
            self._exchange.send(STATE, _encode(_State(full_at[part], running[part])), keeper)

    def _keeper(self) -> WorkerName | None:
        """The worker that keeps the budgets; None: this one."""
        keeper = min(self._exchange.siblings, default=self._exchange.own)
        return keeper if keeper < self._exchange.own else None

    def _name(self, request: str) -> str:
        """The request's name in the store."""
        return _prefix(self._exchange.own) + request

    def _ask(self, question: _Question) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(question)

    def _send(self) -> None:
        while self._unsent:
            part = list(islice(self._unsent, MAX_IN_DATAGRAM))
            keeper = self._keeper()
            if keeper is None:  # it has just ended
                self._on_questions(self._exchange.own, _encode(part))
            elif not self._exchange.send(QUESTIONS, _encode(part), keeper):
                asyncio.get_running_loop().call_later(RETRY_S, self._send)
                return
            elif keeper not in self._exchange.siblings:  # it has died, as was found just now
                continue
            for _ in part:
                self._unsent.popleft()

    # -- datagrams

    def _on_questions(self, sender: WorkerName, data: bytes) -> None:
        self._save_soon()
        answers = []
        for question in _questions.decode(data):
            charges = [
                Charge(Budget(name, of, period_s), amount) for name, of, period_s, amount in question.charges
            ]
            if not question.number:
                self._memory.settle(question.client, question.request, charges, counted=question.counted)
                continue
            found = self._memory.reserve_now(
                question.client, question.request, charges, question.most_concurrent
            )
            answers.append(
                _Answer(question.number, list(found.debts_s), found.exceeded, found.too_many, found.wait_s)
            )
        if sender == self._exchange.own:
            self._on_answers(sender, _encode(answers))
        elif answers:
            self._exchange.send(ANSWERS, _encode(answers), sender)

    def _on_answers(self, sender: WorkerName, data: bytes) -> None:
        for each in _answers.decode(data):
            _, asked = self._asked.get(each.number, (None, None))
            if asked is not None and not asked.done():
                asked.set_result(Reservation(each.debts_s, each.exceeded, each.too_many, each.wait_s))

    def _on_state(self, sender: WorkerName, data: bytes) -> None:
        state = _state.decode(data)
        self._memory.add_state(state.full_at, state.running)
        self._save_soon()


def _file_of(worker: WorkerName) -> str:
    """Name of the file with the state that it keeps."""
    return f"{FILE}.{worker}"


def _prefix(worker: WorkerName) -> str:
    """With which the names of its requests begin."""
    return f"{worker}/"


def _plain(charges: Sequence[Charge]) -> list[tuple[str, int, float, int]]:
    return [(budget.name, budget.amount, budget.period_s, amount) for budget, amount in charges]
