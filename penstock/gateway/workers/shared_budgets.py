"""Budgets that the workers of a gateway share: the keeper has them, and each worker asks it.

A worker asks with one letter for all requests of an iteration of its event loop. The keeper may be late, as
all processes are in a burst: it is waited for, and only one that hangs is done without, see
:class:`penstock.gateway.admission.budgets.Budgets`. Running requests of a worker that has died have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from penstock.gateway.admission.budget_store import (
    LOOKS,
    BudgetStoreError,
    Charge,
    MemoryBudgetStore,
    Reservation,
)
from penstock.gateway.requests.caller import Budget
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import Letter, WorkerName
from penstock.http.eager import TasklessFuture

TIMEOUT_S = 5.0
"""Wait for the keeper: a process that lives on this host and does not answer for so long hangs."""
QUESTIONS, ANSWERS = "budget questions", "budget answers"
SILENT = "the keeper of the budgets is silent"


class _Question(msgspec.Struct, array_like=True, frozen=True):
    number: int
    """0: nobody waits for an answer, as the request has ended."""
    client: str
    request: str
    charges: list[tuple[str, int, str, int, str]]
    """Name, amount and owner of each budget, what is charged, and to which month."""
    most_concurrent: int | None
    counted: bool


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    number: int
    debts: list[float]
    exceeded: int | None
    too_many: bool
    wait_s: float


_encode = msgspec.msgpack.Encoder().encode
_questions = msgspec.msgpack.Decoder(list[_Question])
_answers = msgspec.msgpack.Decoder(list[_Answer])


class SharedBudgetStore:
    """One worker's view of the budgets."""

    def __init__(self, link: KeeperLink, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._asked: dict[int, tuple[TasklessFuture[Reservation], int]] = {}
        """What is waited for, and the look before."""
        self._looks = 0
        """How often it was looked for answers, see :data:`LOOKS`."""
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: list[_Question] = []
        link.on(ANSWERS, self._on_answers)

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        number = next(self._numbers)
        answer: TasklessFuture[Reservation] = TasklessFuture()
        self._asked[number] = answer, self._looks
        self._watch()
        self._ask(_Question(number, client, request, _plain(charges), most_concurrent, counted=False))
        try:
            return await answer
        except (BudgetStoreError, asyncio.CancelledError):
            if most_concurrent is not None:  # it may be granted: its charges stand, but it does not run
                self.settle(client, request, (), counted=True)
            raise
        finally:
            del self._asked[number]

    def settle(self, client: str, request: str, charges: Sequence[Charge], *, counted: bool) -> None:
        self._ask(_Question(0, client, request, _plain(charges), None, counted))

    async def close(self) -> None:
        self._send()
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        if self._timer is None:
            delay_s = self._timeout_s / LOOKS
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Give up answers for which it was looked often enough."""
        self._timer = None
        self._looks += 1
        for answer, before in self._asked.values():
            if self._looks - before > LOOKS:
                _fail(answer)
        if self._asked:
            self._watch()

    def _ask(self, question: _Question) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(question)

    def _send(self) -> None:
        questions, self._unsent = self._unsent, []
        if questions and not self._link.ask_keeper(QUESTIONS, _encode(questions)):
            for question in questions:
                if (asked := self._asked.get(question.number)) is not None:
                    _fail(asked[0])

    def _on_answers(self, caller: WorkerName | None, data: bytes) -> None:
        for each in _answers.decode(data):
            asked = self._asked.get(each.number)
            if asked is not None and not asked[0].done():
                asked[0].set_result(Reservation(each.debts, each.exceeded, each.too_many, each.wait_s))


def _fail(answer: TasklessFuture[Reservation]) -> None:
    if not answer.done():
        answer.set_exception(BudgetStoreError(SILENT))


class BudgetKeeper:
    """The keeper's part."""

    def __init__(self, send: Callable[[WorkerName, Letter], bool], clock: Callable[[], float]) -> None:
        self.handlers = {QUESTIONS: self._on_questions}
        self.store = MemoryBudgetStore(clock)
        self._send = send

    def forget(self, worker: WorkerName) -> None:
        """The worker has ended, and its requests with it."""
        self.store.end_requests(_prefix(worker))

    def _on_questions(self, caller: WorkerName, data: bytes) -> None:
        answers = []
        for each in _questions.decode(data):
            request = _prefix(caller) + each.request
            charges = [
                Charge(Budget.named(name, of, owner), amount, month)
                for name, of, owner, amount, month in each.charges
            ]
            if not each.number:
                self.store.settle(each.client, request, charges, counted=each.counted)
                continue
            found = self.store.reserve_now(each.client, request, charges, each.most_concurrent)
            answers.append(
                _Answer(each.number, list(found.debts), found.exceeded, found.too_many, found.wait_s)
            )
        if answers:
            self._send(caller, Letter(ANSWERS, _encode(answers)))


def _prefix(worker: WorkerName) -> str:
    """With which the names of its requests begin."""
    return f"{worker}/"


def _plain(charges: Sequence[Charge]) -> list[tuple[str, int, str, int, str]]:
    return [(budget.name, budget.amount, budget.owner, amount, month) for budget, amount, month in charges]
