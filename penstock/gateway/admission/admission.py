"""Admits requests to the endpoints: budgets first, then a place."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from penstock.gateway.admission.budgets import Budgets, Reserved, rate_limit_headers
from penstock.gateway.admission.flow_control import FlowControl, FlowRequest, HaveFree
from penstock.gateway.admission.shared_shares import SharedShares
from penstock.gateway.billing.billing import Billing
from penstock.gateway.metric_definitions import QUEUED, QUEUED_BYTES, Figure
from penstock.gateway.requests.caller import Caller
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.model_field import is_form
from penstock.gateway.requests.relayed_routes import INFERENCE_ROUTES
from penstock.gateway.requests.request_body import GENERATION_PATHS, TOKEN_BYTES
from penstock.gateway.requests.unread_routes import is_unread
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.token_usage import CountedTokens
from penstock.http.errors import ApiError, shown
from penstock.http.request import ClientGone

QUEUE_TIMEOUT = b"x-queue-timeout"
"""Header with which a client limits the wait of its request, in seconds."""
MAX_FLOW_NAME = 128
"""Characters of a header's value that distinguish flows."""
FILE_TOKEN_BYTES = 512
"""Estimate of the bytes of a token in files of audio or images, which forms carry. Whisper makes 1,500 of
30 s, which are 960 kB as WAV and 360 kB as MP3."""
FIRST_OUTPUT = 256
"""Estimate of the tokens of a client's first reply."""
OUTPUT_WEIGHT = 0.1
"""Weight of the latest reply in the moving average of a client's replies."""
MAX_GROWTH = 2
"""Factor by which one reply raises that average at most, as a server may count wrongly."""


@dataclass(slots=True)
class Permit:
    """What an admitted request holds until it has ended."""

    input_tokens: int
    output_tokens: int
    """Estimates."""
    reserved: Reserved | None = None
    flow: FlowRequest | None = None
    must_enter: bool = field(default=False, compare=False)
    """Whether it has to reserve budgets, or may have to wait."""
    cost: int = 0
    """Estimate, in billionths."""


@dataclass(slots=True)
class Admission:
    """Admits all requests of a gateway. Without ``flow`` nothing waits."""

    budgets: Budgets
    flow: FlowControl | None = None
    fairness_header: bytes | None = None
    """Name of a header whose values share fairly, in lower case; None: keys do."""
    longest_request_s: float = math.inf
    """``--request-timeout``, which waiting is a part of."""
    billing: Billing = field(default_factory=Billing)
    """What becomes of the costs of requests."""
    shared_shares: SharedShares | None = None
    """Fair shares over several gateways; None: those of this process."""
    _outputs: dict[str, float] = field(default_factory=dict)
    """Average tokens of a reply by the name of a key, and of all others."""

    def permit(self, incoming: IncomingRequest, record: RequestRecord) -> Permit | None:
        """What the request needs, which it holds once it has entered; None: requests of this kind need
        nothing. Raises ApiError."""
        if self.billing.journal is not None:
            self.billing.journal.begin(record)
        caller, body = record.caller, incoming.body
        if not _is_counted(incoming.method, incoming.path):
            return None
        if body is not None:
            permit = Permit(body.tokens, 0)
        else:
            token_bytes = FILE_TOKEN_BYTES if is_form(incoming.headers) else TOKEN_BYTES
            permit = Permit(incoming.size // token_bytes, 0)
        if incoming.path in GENERATION_PATHS:
            average = int(self._outputs.get(caller.name, FIRST_OUTPUT))
            most = None if body is None else body.most_output
            permit.output_tokens = average if most is None else min(most, average)
        if self.flow is not None:
            permit.flow = self._flow_request(incoming, record, permit)
        permit.must_enter = permit.flow is not None or caller.is_limited
        return permit

    async def enter(
        self,
        permit: Permit,
        record: RequestRecord,
        candidates: Callable[[], tuple[Hashable, HaveFree]],
        gone: asyncio.Future[None] | None,
    ) -> None:
        """Reserve budgets, and wait for a place at one of the endpoints that may get the request;
        ``candidates`` gives a name for these, and whether they have free places. See
        :meth:`FlowControl.enter`. Raises ApiError, ClientGone; then the request holds nothing."""
        caller = record.caller
        if caller.is_limited:
            permit.cost = self._cost(record, permit.input_tokens, permit.output_tokens)
            permit.reserved = reserved = await self.budgets.reserve(
                caller,
                input_tokens=permit.input_tokens,
                output_tokens=permit.output_tokens,
                cost=permit.cost,
                models=(record.target_model, record.model),
            )
            record.reply_headers = rate_limit_headers(reserved.charges, reserved.debts, self.budgets.wall())
        if self.flow is not None and permit.flow is not None:
            record.waits = True
            try:
                key, have_free = candidates()
                await self.flow.enter(permit.flow, key, have_free, gone)
            except BaseException as error:
                if permit.reserved is not None:
                    self.budgets.settle(permit.reserved, requests=0, input_tokens=0, output_tokens=0)
                if isinstance(error, ClientGone):
                    record.reason = "the client left while its request waited for a model server"
                raise
            finally:
                record.waits = False
                record.queued_s = permit.flow.queued_s

    def queued(self, key: Hashable) -> float:
        """Requests that wait in the gateway for the endpoints of this name, see :meth:`enter`; estimated
        where other workers have some."""
        return 0.0 if self.flow is None else self.flow.queued(key)

    def sent(self, permit: Permit) -> None:
        """An endpoint counts the request."""
        if self.flow is not None and permit.flow is not None:
            self.flow.sent(permit.flow)

    def finish(self, permit: Permit, record: RequestRecord) -> None:
        """The request has ended. Called once."""
        used = self._used(permit, record)
        if self.flow is not None and permit.flow is not None:
            self.flow.ended(permit.flow, float(sum(used)))
        if permit.reserved is not None:
            self.budgets.settle(
                permit.reserved,
                requests=1 if record.attempts else 0,
                input_tokens=used[0],
                output_tokens=used[1],
                cost=self._cost_of(record, used),
            )

    def lose(self, permit: Permit) -> None:
        """Whether the request still runs is not known: it has no place, does not count as a concurrent one,
        and its estimates stand."""
        if self.flow is not None and permit.flow is not None:
            self.flow.ended(permit.flow, None)
        if permit.reserved is not None:
            self.budgets.settle(
                permit.reserved,
                requests=1,
                input_tokens=permit.input_tokens,
                output_tokens=permit.output_tokens,
                cost=permit.cost,
            )

    def figures(self) -> Iterator[Figure]:
        """For metrics."""
        if self.billing.journal is not None:
            yield from self.billing.journal.figures()
        if self.flow is None:
            return
        for priority, (requests, size) in self.flow.waiting_by_priority().items():
            yield Figure(QUEUED, requests, {"priority": str(priority)})
            yield Figure(QUEUED_BYTES, size, {"priority": str(priority)})

    def stop(self) -> int:
        """Refuse the requests that wait, as the gateway ends; returns how many there were."""
        return 0 if self.flow is None else self.flow.stop()

    async def close(self) -> None:
        await self.budgets.close()

    def _flow_request(self, incoming: IncomingRequest, record: RequestRecord, permit: Permit) -> FlowRequest:
        """Raises ApiError."""
        caller, timeout_s = record.caller, math.inf
        flow = caller.id
        for name, value in incoming.headers:
            if name == QUEUE_TIMEOUT:
                timeout_s = _seconds(value.decode("latin-1"))
            elif name == self.fairness_header:
                flow = value.decode("latin-1")[:MAX_FLOW_NAME]
        return FlowRequest(
            flow=flow,
            weight=caller.weight,
            priority=record.priority,
            tokens=float(permit.input_tokens + permit.output_tokens),
            size=incoming.size,
            timeout_s=timeout_s,
            deadline=record.began_at + self.longest_request_s,
        )

    def _used(self, permit: Permit, record: RequestRecord) -> tuple[int, int]:
        """Tokens of prompt and reply; estimates where the endpoint did not say."""
        seen = record.seen
        if not record.attempts or record.status >= 400:
            return 0, 0
        usage = seen.usage
        output = seen.reported_output
        if output is None:
            output = seen.token_events or (0 if seen.stream else permit.output_tokens)
        elif record.path in GENERATION_PATHS:
            self._learn(record.caller, output)
        prompt = permit.input_tokens if usage is None or usage.input_tokens is None else usage.input_tokens
        return prompt, output

    def _cost(self, record: RequestRecord, input_tokens: int, output_tokens: int) -> int:
        pricing = self.billing.pricing
        if not pricing.currency:
            return 0
        return pricing.cost(record, CountedTokens(input_tokens, None, output_tokens)) or 0

    def _cost_of(self, record: RequestRecord, used: tuple[int, int]) -> int:
        """What a request has cost, or is estimated to have where the server did not count all tokens."""
        seen = record.seen
        if used == (0, 0) or seen.usage is None or None in (seen.usage.input_tokens, seen.reported_output):
            return self._cost(record, *used)
        self.billing.pricing.set_cost(record)
        return record.cost or 0

    def _learn(self, caller: Caller, output: int) -> None:
        before = self._outputs.get(caller.name, float(FIRST_OUTPUT))
        after = before + OUTPUT_WEIGHT * (output - before)
        self._outputs[caller.name] = min(after, MAX_GROWTH * max(before, 1.0))


def _is_counted(method: str, path: str) -> bool:
    if is_unread(method, path):
        return True
    return method == "POST" and (path in GENERATION_PATHS or path in INFERENCE_ROUTES)


def _seconds(text: str) -> float:
    """Raises ApiError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        name = QUEUE_TIMEOUT.decode()
        message = f"The header {name!r} is {shown(text)!r}; it takes a number of seconds, at least 0."
        raise ApiError(400, message, code="bad_header")
    return value
