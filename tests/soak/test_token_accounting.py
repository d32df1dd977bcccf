"""The fleet's counts and its clients' must fit, exactly where no process died."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.metrics.exposition import exposition
from tests.soak.request_verification import ClientCounts, RequestEnd
from tests.soak.token_accounting import ServerCounts, reconcile

ZERO = ServerCounts(**dict.fromkeys(ServerCounts.__struct_fields__, 0.0))
AFTER = msgspec.structs.replace(
    ZERO, generated=130, delivered=120, discarded=10, completed=5, aborted=2, cut=1
)
CLIENTS = ClientCounts(
    Counter({RequestEnd.COMPLETE: 4, RequestEnd.LEFT: 3, RequestEnd.CUT: 1, RequestEnd.REFUSED: 9}),
    streams=4,
    complete_tokens=100,
    partial_tokens=15,
    partial_asked=90,
)


def errors(after: ServerCounts = AFTER, clients: ClientCounts = CLIENTS, deaths: int = 0) -> list[str]:
    return reconcile(ZERO, after, clients, deaths=deaths, uncertain=20.0 * deaths)[1]


def changed(**fields: Any) -> ServerCounts:
    return msgspec.structs.replace(AFTER, **fields)


def test_a_balance() -> None:
    found, wrong = reconcile(ZERO, AFTER, CLIENTS, deaths=0, uncertain=0.0)
    assert wrong == []
    assert (found.generated, found.delivered, found.discarded, found.unaccounted) == (130, 120, 10, 0)
    assert (found.uncertain, found.clients_complete, found.clients_partial) == (0, 100, 15)


@pytest.mark.parametrize(
    ("after", "error"),
    [
        (changed(generated=131), "engines generated 131 tokens, API servers got 130"),
        (changed(generated=129), "engines generated 129"),
        (changed(generated=124, delivered=114), "API servers delivered 114 tokens"),
        (changed(generated=201, delivered=191), "API servers delivered 191 tokens"),
        (changed(completed=3), "API servers completed 3 requests, clients 4, and left 4"),
        (changed(completed=9), "API servers completed 9"),
        (changed(aborted=3), "API servers ended 9 requests, clients only 8"),
        (changed(cut=0), "1 connections were cut, API servers cut 0"),
        (changed(failed=1), "1 requests failed"),
    ],
)
def test_what_does_not_fit(after: ServerCounts, error: str) -> None:
    assert any(text.startswith(error) for text in errors(after))


def test_deaths_explain_some_of_it() -> None:
    assert errors(changed(generated=150, completed=0), deaths=1) == []
    assert errors(changed(generated=151), deaths=1) != []
    assert errors(changed(delivered=95, generated=105), deaths=1) == []
    assert errors(changed(delivered=94, generated=104), deaths=1) != []


def test_counters_never_go_backwards() -> None:
    _, wrong = reconcile(AFTER, changed(aborted=1), ClientCounts(), deaths=1, uncertain=1000.0)
    assert any("counters went backwards" in text for text in wrong)


def test_figures_from_an_exposition() -> None:
    text = exposition(
        {
            "vllm:generation_tokens": {("m", "0"): 5.0, ("m", "1"): 6.0},
            "penstock:tokens_delivered": {("0",): 7.0, ("1",): 3.0},
            "penstock:tokens_discarded": {("0",): 1.0},
            "penstock:engine_up": {("m", "0"): 1.0, ("m", "1"): 0.0},
            "penstock:requests": {("0", "stop"): 2.0, ("1", "length"): 3.0, ("1", "cut"): 1.0},
            "penstock:streams": {("0",): 1.0},
        }
    )
    found = ServerCounts.from_exposition(b"".join(text).decode())
    assert (found.generated, found.delivered, found.discarded, found.engines_up) == (11, 10, 1, 1)
    assert (found.completed, found.cut, found.failed) == (5, 1, 0)
    assert not found.idle
    assert msgspec.structs.replace(found, streams=0.0).idle
