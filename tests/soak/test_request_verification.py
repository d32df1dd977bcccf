"""Every request has one end, and what must not happen is found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.soak.exchange import SentRequest
from tests.soak.oracle import Oracle
from tests.soak.received_reply import ReceivedReply
from tests.soak.request_mix import COMPLETIONS, ClientBehaviour, RequestSpec
from tests.soak.request_verification import DEFECTS, MAX_SAMPLES, ClientCounts, RequestEnd, RequestVerifier

ORACLE = Oracle(DEMO_DIR)
OUTPUT = ORACLE.output(7, 12, None)
KILLED = 4444
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def ledger() -> RequestVerifier:
    return RequestVerifier(ORACLE, lambda attempt: attempt.port == KILLED)


def spec(behaviour: ClientBehaviour = ClientBehaviour.READ, **fields: Any) -> RequestSpec:
    body = {"prompt": "x", "seed": 7, "max_tokens": 12, "stream": True}
    return RequestSpec(COMPLETIONS, body | fields, behaviour, outputs=[OUTPUT])


def event(text: str, **more: Any) -> bytes:
    body = msgspec.json.encode({"choices": [{"index": 0, "text": text} | more]})
    return b"data: " + body + b"\n\n"


def attempt(*events: bytes, end: bool = True, port: int = 1, reused: bool = False) -> SentRequest:
    made = SentRequest(port, 0.0, reused=reused)
    made.seen = ReceivedReply()
    made.seen.feed(HEAD + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events))
    if end:
        made.seen.feed(b"0\r\n\r\n")
    return made


def whole() -> list[bytes]:
    half = len(OUTPUT.text) // 2
    return [event(OUTPUT.text[:half]), event(OUTPUT.text[half:], finish_reason="length"), b"data: [DONE]\n\n"]


def refusal(status: int) -> SentRequest:
    made = SentRequest(1, 0.0, reused=False)
    body = b'{"error":{"message":"no"}}'
    made.seen.feed(b"HTTP/1.1 %d Reason\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
    return made


def test_a_complete_reply_counts_its_tokens() -> None:
    book = ledger()
    assert book.verify(spec(), attempt(*whole())) is RequestEnd.COMPLETE
    assert (book.counts.complete_tokens, book.counts.streams, book.counts.requests) == (12, 1, 1)
    assert not book.defects


def test_a_reply_that_ends_early_counts_what_came() -> None:
    book = ledger()
    part = ORACLE.text(OUTPUT.tokens[:5])
    left = attempt(event(part), end=False)
    left.left = True
    assert book.verify(spec(), left) is RequestEnd.LEFT
    assert book.verify(spec(), attempt(event(part), end=False, port=KILLED)) is RequestEnd.SERVER_KILLED
    assert book.verify(spec(ClientBehaviour.STALL), attempt(event(part), end=False)) is RequestEnd.CUT
    assert (book.counts.partial_tokens, book.counts.partial_asked) == (15, 36)
    assert not book.defects


def test_refusals() -> None:
    book = ledger()
    bad = RequestSpec(COMPLETIONS, b"{", status=400)
    assert book.verify(bad, refusal(400)) is RequestEnd.REFUSED
    assert book.verify(bad, refusal(500)) is RequestEnd.FAILED
    assert book.verify(spec(), refusal(503)) is RequestEnd.FAILED
    assert book.verify(bad, attempt(*whole())) is RequestEnd.FAILED
    assert book.verify(bad, attempt(end=False, port=KILLED)) is RequestEnd.SERVER_KILLED


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event("\0"), *whole()[1:]], r"at 0: '\\x00"),
        (whole()[:1] + whole()[:1], "at "),
        (whole()[1:], "at 0"),
        ([event(OUTPUT.text[:-1], finish_reason="length"), whole()[2]], "characters"),
        ([event(OUTPUT.text, finish_reason="stop"), whole()[2]], "finish reason stop instead of length"),
        ([event(OUTPUT.text, finish_reason="length")], r"no \[DONE\]"),
        ([event(OUTPUT.text, token_ids=[1, 2], finish_reason="length"), whole()[2]], "at 0"),
        ([*whole()[:2], b'data: {"usage":{"completion_tokens":11}}\n\n', whole()[2]], "usage of 11 tokens"),
        ([whole()[0], event("", index=1), *whole()[1:]], r"choices \[0, 1\] of 1"),
    ],
)
def test_wrong_replies(events: list[bytes], reason: str) -> None:
    book = ledger()
    assert book.verify(spec(), attempt(*events)) is RequestEnd.WRONG
    with pytest.raises(AssertionError, match=reason):
        assert not book.findings, book.findings[RequestEnd.WRONG][0]


def test_what_was_asked_for_must_come() -> None:
    book = ledger()
    assert book.verify(spec(stream_options={"include_usage": True}), attempt(*whole())) is RequestEnd.WRONG
    assert book.verify(spec(return_token_ids=True), attempt(*whole())) is RequestEnd.WRONG
    reasons = book.findings[RequestEnd.WRONG]
    assert "no usage" in reasons[0]
    assert "0 of 12 token ids" in reasons[1]


def test_other_defects() -> None:
    book = ledger()
    assert book.verify(spec(), attempt(*whole()[:1], end=False)) is RequestEnd.BROKEN
    late = attempt(end=False)
    late.stuck = True
    assert book.verify(spec(), late) is RequestEnd.STUCK
    error = attempt(event("a"), b'data: {"error":{"message":"engine died"}}\n\n')
    assert book.verify(spec(), error) is RequestEnd.FAILED
    book.record_unsent(ConnectionRefusedError(111, "refused"))
    assert book.counts.ends[RequestEnd.BROKEN] == book.defects[RequestEnd.BROKEN] == 2
    assert set(book.defects) == {RequestEnd.BROKEN, RequestEnd.STUCK, RequestEnd.FAILED} < DEFECTS


def test_findings_are_counted_all_and_kept_some() -> None:
    book = ledger()
    for _ in range(MAX_SAMPLES + 5):
        book.record_defect("kind", "text")
    assert book.defects == {"kind": MAX_SAMPLES + 5}
    assert len(book.findings["kind"]) == MAX_SAMPLES


def test_a_kept_connection_that_gives_nothing_is_stale() -> None:
    assert attempt(end=False, reused=True).seen.status == 200
    assert not attempt(end=False, reused=True).stale
    nothing = SentRequest(1, 0.0, reused=True)
    assert nothing.stale
    assert not SentRequest(1, 0.0, reused=False).stale


def test_tallies_since_a_time() -> None:
    book = ledger()
    book.verify(spec(), attempt(*whole()))
    before = book.counts.copy()
    book.verify(spec(), attempt(*whole()))
    assert book.counts.since(before) == before
    assert book.counts.since(book.counts) == ClientCounts()
