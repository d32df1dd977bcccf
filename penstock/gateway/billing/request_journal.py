"""A worker's part in the billing file: it notes each request when it is admitted, and when it has ended.

Both cost a copy to memory, no call of the system. The supervisor writes the lines to the file, see
:mod:`~penstock.gateway.billing.billing_file`.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count

import msgspec
import numpy as np

from penstock.gateway.billing.journal_slots import ENDED, FREE, MAX_LINE, SLOTS, JournalSlots
from penstock.gateway.billing.prices import as_decimal
from penstock.gateway.metric_definitions import BILLING_RECORDS, BILLING_WAITING, Figure
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.responses.request_record import RequestRecord
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_lost = RateLimitedLog(log, logging.ERROR)

MAX_FILES = 64
"""Files of 4 MB: 65,536 requests that run, or whose lines the supervisor cannot write."""
MAX_NOTES = 256
"""Requests at a time of which it is noted where they were sent."""
NOBODY = 401
"""Status of requests that nobody pays for: whoever has no key must not fill the disk."""
WORKER_LOST = "worker_lost"
"""Outcome of a request whose worker ended before it did."""
SHORT_NAME = 40
"""Characters of names where longer ones do not fit: each takes six bytes at most."""


class BillingLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the billing file. Fields that are unknown are left out."""

    id: str
    """No other line has it."""
    request_id: str
    began: str
    time: str = ""
    """When it ended."""
    path: str = ""
    key: str = ""
    team: str = ""
    model: str = ""
    target_model: str = ""
    pool: str = ""
    endpoint: str = ""
    outcome: str = ""
    status: int = 0
    attempts: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    tokens_from: str = ""
    """Who counted the output. ``usage``: the server; ``events``: the gateway, of the events with tokens."""
    cost: msgspec.Raw | None = None
    currency: str = ""


_encode = msgspec.json.Encoder().encode
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029]")


class RequestJournal:
    """The journal of one worker, in files of ``folder``. ``clock`` gives the seconds of records, ``wall``
    Unix times."""

    def __init__(
        self, folder: str, clock: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        """Raises OSError."""
        self._folder = folder
        self._clock = clock
        self._wall = wall
        self._name = uuid.uuid4().hex
        self._numbers = count()
        self._files = [JournalSlots.create(folder)]
        self._free = list(reversed(range(SLOTS)))
        """Slots that are known to be free: of the file of their number by :data:`SLOTS`."""
        self._begun: dict[RequestRecord, tuple[int, str]] = {}
        """Slots of requests that run, and the ids of their lines."""
        self._unsent: list[RequestRecord] = []
        """Requests of which it is not noted where they were sent."""
        self._counts = {"recorded": 0, "lost": 0}

    def begin(self, record: RequestRecord) -> None:
        """A request is admitted: it has a line from here on, whatever becomes of this process."""
        if record not in self._begun and (slot := self._take_slot()) is not None:
            id = self._new_id()
            self._begun[record] = slot, id
            self._unsent.append(record)
            self._files[slot // SLOTS].begin(slot % SLOTS, self._line(record, id, WORKER_LOST))

    def note_sent(self) -> None:
        """Note of requests that run where they were sent; called several times a second."""
        unsent, self._unsent, notes = self._unsent, [], 0
        for record in unsent:
            slot, id = self._begun.get(record, (None, ""))
            if slot is None:
                continue
            if not record.endpoint or notes >= MAX_NOTES:
                self._unsent.append(record)
                continue
            notes += 1
            self._files[slot // SLOTS].update(slot % SLOTS, self._line(record, id, WORKER_LOST))

    def end(self, record: RequestRecord) -> None:
        """A request has ended."""
        slot, id = self._begun.pop(record, (None, ""))
        if slot is None and (not (record.path and record.method) or record.status == NOBODY):
            return  # it was refused before it was complete, or another gateway process has its line
        if slot is None:
            slot, id = self._take_slot(), self._new_id()
        if slot is None:
            self._counts["lost"] += 1
            return
        self._counts["recorded"] += 1
        self._files[slot // SLOTS].end(slot % SLOTS, self._line(record, id, str(record.outcome)))

    def figures(self) -> Iterator[Figure]:
        """For metrics."""
        for state, number in self._counts.items():
            yield Figure(BILLING_RECORDS, number, {"state": state})
        yield Figure(BILLING_WAITING, sum(int((each.states == ENDED).sum()) for each in self._files))

    def _new_id(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    def _take_slot(self) -> int | None:
        """A free slot; None: there is no room."""
        if not self._free:
            for number, each in enumerate(self._files):
                self._free += (np.flatnonzero(each.states == FREE) + number * SLOTS).tolist()[::-1]
        if not self._free and not self._add_file():
            return None
        return self._free.pop()

    def _add_file(self) -> bool:
        number = len(self._files)
        if number >= MAX_FILES:
            _log_lost("full", "the billing journal is full: requests are served, but have no line")
            return False
        try:
            self._files.append(JournalSlots.create(self._folder))
        except OSError as error:
            _log_lost(
                "room", "the billing journal %s cannot grow: %s; requests have no line", self._folder, error
            )
            return False
        self._free += reversed(range(number * SLOTS, (number + 1) * SLOTS))
        return True

    def _line(self, record: RequestRecord, id: str, outcome: str) -> bytes:
        line = self._encoded(record, id, outcome, 256)
        return line if len(line) <= MAX_LINE else self._encoded(record, id, outcome, SHORT_NAME)

    def _encoded(self, record: RequestRecord, id: str, outcome: str, most: int) -> bytes:
        now, wall = self._clock(), self._wall()
        tokens = record.seen.tokens
        counted = tokens.output is not None
        lost = outcome == WORKER_LOST
        line = _encode(
            BillingLine(
                id=id,
                request_id=bounded_name(record.request_id, most),
                began=_iso(wall - (now - record.began_at)),
                time="" if lost else _iso(wall - (now - record.ended_at)),
                path=bounded_name(record.path, most),
                key=record.caller.name,
                team=bounded_name(record.caller.team, most),
                model=bounded_name(record.model, most),
                target_model=bounded_name(record.target_model, most),
                pool=record.pool,
                endpoint=bounded_name(record.endpoint, most),
                outcome=outcome,
                status=record.status,
                attempts=record.attempts,
                input_tokens=tokens.input,
                cached_tokens=tokens.cached,
                output_tokens=tokens.output,
                reasoning_tokens=tokens.reasoning,
                tokens_from=("events" if record.seen.reported_output is None else "usage") if counted else "",
                cost=None if record.cost is None else msgspec.Raw(as_decimal(record.cost).encode()),
                currency=record.currency,
            )
        )
        return line if line.isascii() and b"\x7f" not in line else _escaped(line)


def _escaped(line: bytes) -> bytes:
    """The same JSON without characters that some readers take for the end of a line, or terminals act on."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", line.decode()).encode()


def _iso(at: float) -> str:
    second = int(at)
    return f"{_second(second)}.{int(1000 * (at - second)):03}+00:00"


@lru_cache(64)
def _second(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")
