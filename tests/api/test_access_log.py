from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.api.access_log import MAX_PATH, AccessLog
from penstock.api.api_request import ApiRequest
from penstock.dialects.completions.reply import CompletionReply
from penstock.generation.replies.token_usage import TokenUsage
from tests.api.requests import api_request
from tests.http.requests import http_request


class FakeReply:
    """As much of a reply as the log reads."""

    def __init__(self, outcome: str, *, started: bool = True) -> None:
        self.outcome = outcome
        self.started = started
        self.format = CompletionReply("cmpl-7", "m", "assistant")

    def usage(self) -> TokenUsage:
        return TokenUsage(3, 12, None)


@pytest.fixture(autouse=True)
def _level_is_restored() -> Iterator[None]:
    yield
    logging.getLogger("penstock.access").setLevel(logging.NOTSET)


def ended(
    status: int, reply: FakeReply | None = None, path: bytes = b"/v1/models", request_id: str = "7"
) -> ApiRequest:
    request = api_request(http_request(target=path), request_id=request_id)
    request.reply = reply  # type: ignore[assignment]
    request.http.status = status
    return request


def lines(caplog: pytest.LogCaptureFixture, mode: Any, *requests: ApiRequest) -> list[str]:
    access_log = AccessLog(mode)
    for request in requests:
        access_log.write(request)
    return [re.sub(r"seconds=\d+\.\d{3}", "seconds=S", record.getMessage()) for record in caplog.records]


def test_a_line_says_who_what_and_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, "all", ended(200), ended(200, FakeReply("length"), b"/v1/completions")) == [
        "request_id=7 method=GET path=/v1/models status=200 seconds=S",
        "request_id=cmpl-7 method=GET path=/v1/completions status=200 seconds=S "
        "prompt_tokens=3 output_tokens=12 outcome=length",
    ]


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/ping", b"/metrics", b"/status"])
def test_probes_and_scrapes_are_logged_when_they_fail(caplog: pytest.LogCaptureFixture, path: bytes) -> None:
    (line,) = lines(caplog, "all", ended(200, path=path), ended(503, path=path))
    assert "status=503" in line


def test_errors_alone(caplog: pytest.LogCaptureFixture) -> None:
    good = (ended(200), ended(200, FakeReply("stop")), ended(204))
    bad = (ended(401), ended(200, FakeReply("cut")), ended(200, FakeReply("error")), ended(503))
    assert [line.split()[3] for line in lines(caplog, "errors", *good, *bad)] == [
        "status=401",
        "status=200",
        "status=200",
        "status=503",
    ]


def test_none(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, "none", ended(500)) == []


def test_a_client_cannot_forge_lines_or_fields(caplog: pytest.LogCaptureFixture) -> None:
    [line] = lines(caplog, "all", ended(404, path=b"/a=b\xff", request_id='x status=200 "\n'))
    assert line.startswith('request_id="x status=200 \\"\\n" method=GET path="/a=b\\u00ff" status=404 ')


def test_a_long_path_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    [line] = lines(caplog, "all", ended(404, path=b"/" + b"a" * 60_000))
    assert f'path="/{"a" * (MAX_PATH - 2)}\\u2026" status=404' in line


@pytest.mark.parametrize(("mode", "count"), [("none", 0), ("errors", 1), ("all", 1)])
def test_what_was_no_whole_request(caplog: pytest.LogCaptureFixture, mode: Any, count: int) -> None:
    AccessLog(mode).refused(431, "Too large.")
    assert [record.getMessage() for record in caplog.records] == ['status=431 refused="Too large."'] * count
