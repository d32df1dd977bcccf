"""Classifies how each request ended, checks its reply, and records defects."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tests.soak.exchange import SentRequest
from tests.soak.oracle import Oracle, Output
from tests.soak.received_reply import ReceivedReply
from tests.soak.request_mix import UNKNOWN_ROUTE, ClientBehaviour, RequestSpec

MAX_SAMPLES = 20
"""Maximum samples of a kind of defect."""


class RequestEnd(enum.StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    REFUSED = "refused as it should be"
    LEFT = "client left"
    CUT = "cut, the client did not read"
    SERVER_KILLED = "its API server was killed"
    HOSTILE = "hostile, and may generate tokens"
    # -- what must not happen
    WRONG = "wrong reply"
    FAILED = "failed"
    BROKEN = "connection broken"
    STUCK = "no end in time"


DEFECTS = frozenset({RequestEnd.WRONG, RequestEnd.FAILED, RequestEnd.BROKEN, RequestEnd.STUCK})


class ClientCounts(msgspec.Struct):
    """Requests and tokens, counted by the clients."""

    ends: Counter[RequestEnd] = msgspec.field(default_factory=Counter)
    streams: int = 0
    """Choices of complete requests."""
    complete_tokens: int = 0
    """Tokens of complete requests, known exactly."""
    partial_tokens: int = 0
    """Tokens received by other requests."""
    partial_asked: int = 0
    """Maximum tokens that those could have received."""
    retried: int = 0
    """Requests sent again because their reused connection was closed."""

    @property
    def requests(self) -> int:
        return self.ends.total()

    def ended_with(self, *ends: RequestEnd) -> int:
        """Requests with these ends."""
        return sum(self.ends[end] for end in ends)

    def since(self, before: ClientCounts) -> ClientCounts:
        """The difference to ``before``, an earlier copy."""
        return ClientCounts(
            ends=self.ends - before.ends,
            streams=self.streams - before.streams,
            complete_tokens=self.complete_tokens - before.complete_tokens,
            partial_tokens=self.partial_tokens - before.partial_tokens,
            partial_asked=self.partial_asked - before.partial_asked,
            retried=self.retried - before.retried,
        )

    def copy(self) -> ClientCounts:
        return self.since(ClientCounts())


class RequestVerifier:
    """Verifies each request once. ``killed`` returns whether its API server was killed."""

    def __init__(
        self, oracle: Oracle, killed: Callable[[SentRequest], bool], *, through_gateway: bool = False
    ) -> None:
        """``through_gateway``: a client that does not read is cut by an error of the gateway, and
        unknown routes are forbidden."""
        self._through_gateway = through_gateway
        self.counts = ClientCounts()
        self.findings: dict[str, list[str]] = {}
        """Samples of defects by kind, at most MAX_SAMPLES each."""
        self._counts: Counter[str] = Counter()
        self._oracle = oracle
        self._killed = killed

    @property
    def defects(self) -> Mapping[str, int]:
        """Counts of defects by kind."""
        return self._counts

    def record_defect(self, kind: str, text: str) -> None:
        """Records a defect."""
        self._counts[kind] += 1
        samples = self.findings.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            samples.append(text)

    def verify(self, spec: RequestSpec, attempt: SentRequest) -> RequestEnd:
        """Classifies a finished request and checks its reply."""
        end, reason = self._judge(spec, attempt)
        self.counts.ends[end] += 1
        seen = attempt.seen
        if end is RequestEnd.COMPLETE:
            self.counts.streams += len(spec.outputs)
            self.counts.complete_tokens += sum(len(output.tokens) for output in spec.outputs)
        elif spec.status == 200:
            self.counts.partial_asked += spec.asked_tokens
            self.counts.partial_tokens += sum(
                self._oracle.tokens_in(output.tokens, len(seen.texts[index]))
                for index, output in enumerate(spec.outputs)
                if index in seen.texts
            )
        if end in DEFECTS:
            self.record_defect(end, f"{reason}; {_shown(spec)}")
        return end

    def record_hostile(self, tokens: int) -> None:
        """Counts a hostile request for which engines may generate up to ``tokens`` tokens."""
        if tokens:
            self.counts.ends[RequestEnd.HOSTILE] += 1
            self.counts.partial_asked += tokens

    def record_unsent(self, error: Exception) -> None:
        """Records a request whose connection failed, a defect: the listening socket is never closed."""
        self.counts.ends[RequestEnd.BROKEN] += 1
        self.record_defect(RequestEnd.BROKEN, f"cannot connect: {error!r}")

    def _judge(self, spec: RequestSpec, attempt: SentRequest) -> tuple[RequestEnd, str]:
        seen = attempt.seen
        killed = self._killed(attempt)
        if attempt.stuck:
            return RequestEnd.STUCK, f"status {seen.status}, {seen.events} events"
        if seen.whole and seen.status != 200:
            relayed = spec.path != UNKNOWN_ROUTE or not self._through_gateway
            fits = seen.status == (spec.status if relayed else 403) and bool(seen.error)
            return (RequestEnd.REFUSED if fits else RequestEnd.FAILED), f"HTTP {seen.status}: {seen.error}"
        if seen.error and self._through_gateway and spec.behaviour is ClientBehaviour.STALL:
            return RequestEnd.CUT, ""
        if seen.error:
            return RequestEnd.FAILED, seen.error
        if spec.status != 200:
            return (
                RequestEnd.SERVER_KILLED if killed else RequestEnd.FAILED
            ), f"not refused with {spec.status}"
        wrong = _difference(spec, seen)
        if wrong:
            return RequestEnd.WRONG, wrong
        if seen.whole:
            return RequestEnd.COMPLETE, ""
        if attempt.left:
            return RequestEnd.LEFT, ""
        if killed:
            return RequestEnd.SERVER_KILLED, ""
        if spec.behaviour is ClientBehaviour.STALL:
            return RequestEnd.CUT, ""
        return RequestEnd.BROKEN, f"after {seen.events} events; {seen.cut_reason}"


def _difference(spec: RequestSpec, seen: ReceivedReply) -> str:
    """Difference of a reply, or its beginning, to the expected one; empty if there is none."""
    for index, output in enumerate(spec.outputs):
        wrong = _output_difference(output, spec, seen, index)
        if wrong:
            return f"choice {index}: {wrong}"
    if not set(seen.texts) <= set(range(len(spec.outputs))):
        return f"choices {sorted(seen.texts)} of {len(spec.outputs)}"
    if not seen.whole:
        return ""
    if spec.streamed and not seen.done:
        return "no [DONE]"
    asked = not spec.streamed or (isinstance(spec.content, dict) and "stream_options" in spec.content)
    if asked and seen.usage is None:
        return "no usage"
    expected = sum(len(output.tokens) for output in spec.outputs)
    if seen.usage is not None and seen.usage.completion_tokens != expected:
        return f"usage of {seen.usage.completion_tokens} tokens instead of {expected}"
    return ""


def _output_difference(output: Output, spec: RequestSpec, seen: ReceivedReply, index: int) -> str:
    """The same for one choice."""
    text = seen.texts.get(index, "")
    if not output.text.startswith(text):
        return _first_difference(output.text, text)
    tokens = seen.tokens.get(index, [])
    if tokens != output.tokens[: len(tokens)]:
        return _first_difference(output.tokens, tokens)
    if not seen.whole:
        return ""
    if len(text) < len(output.text):
        return f"{len(text)} of {len(output.text)} characters"
    with_ids = isinstance(spec.content, dict) and "return_token_ids" in spec.content
    if with_ids and len(tokens) < len(output.tokens):
        return f"{len(tokens)} of {len(output.tokens)} token ids"
    if seen.finish_reasons.get(index) != output.finish_reason:
        return f"finish reason {seen.finish_reasons.get(index)} instead of {output.finish_reason}"
    return ""


def _first_difference(expected: Any, found: Any) -> str:
    pairs = zip(expected, found, strict=False)
    at = next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found))
    )
    return f"at {at}: {found[at : at + 20]!r} instead of {expected[at : at + 20]!r}"


def _shown(spec: RequestSpec) -> str:
    return f"{spec.behaviour.value}, {spec.path} {spec.body[:400]!r}"
