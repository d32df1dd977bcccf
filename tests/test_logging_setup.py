from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock import logging_setup


@pytest.fixture
def root() -> Iterator[None]:
    """Logging as it was, after the test."""
    names = ["", "penstock"]
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers[:]
    yield
    logging.captureWarnings(False)
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("root")
def test_every_line_has_time_level_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    logging_setup.configure("engine 1", "info")
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("penstock.engine").exception("it failed")
    lines = stderr.getvalue().splitlines()
    assert len(lines) > 3
    for line in lines:
        assert re.match(r"\d\d:\d\d:\d\d\.\d{3} ERROR   engine 1     ", line)
    assert lines[0].endswith("it failed")
    assert lines[-1].endswith("second")


@pytest.mark.usefixtures("root")
def test_level_is_for_our_own_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    logging_setup.configure("supervisor", "info")
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    logging.getLogger("penstock.x").info("ours")
    logging.getLogger("penstock.x").debug("too fine")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("their warning")
    assert [line.split()[-1] for line in stderr.getvalue().splitlines()] == ["ours", "warning"]


@pytest.mark.usefixtures("root")
def test_a_closed_terminal_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logging_setup.configure("supervisor", "info")
    monkeypatch.setattr(sys, "stderr", Gone())
    logging.getLogger("penstock").error("nobody reads this")


def test_a_repeated_event_has_one_line_per_subject_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    caplog.set_level(logging.WARNING)
    warn = logging_setup.RateLimitedLog(logging.getLogger("penstock.peer"), interval_s=60, clock=lambda: now)
    for _ in range(1000):
        warn("engine 1", "engine %d: %s", 1, "bad frame")
    warn("engine 2", "engine %d: %s", 2, "bad frame")
    now = 60.0
    warn("engine 1", "engine %d: %s", 1, "other fault")
    assert caplog.messages == [
        "engine 1: bad frame",
        "engine 2: bad frame",
        "engine 1: other fault (and 999 more like it since the last line)",
    ]


def test_subjects_that_a_peer_invents_are_forgotten() -> None:
    log = logging_setup.RateLimitedLog(logging.getLogger("penstock.quiet"), logging.DEBUG)
    for number in range(3 * logging_setup.MAX_SUBJECTS):
        log(f"peer {number}", "no")
    assert len(log._subjects) == logging_setup.MAX_SUBJECTS


@pytest.mark.usefixtures("root")
def test_a_line_of_json_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    logging_setup.configure("engine 1", "info", "json")
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    log = logging.getLogger("penstock.engine")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("it %s", "failed")
    logging_setup.log_event(log, "request", {"status": 200}, "status=200")
    raised = threading.Thread(target=lambda: 1 / 0)
    raised.start()
    raised.join()
    failed, event, uncaught = map(json.loads, stderr.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", failed.pop("time"))
    assert failed.pop("exception").endswith("ValueError: first\nsecond")
    about = {"process": "engine 1", "logger": "penstock.engine"}
    assert failed == {"level": "error", "message": "it failed", **about}
    del event["time"]
    assert event == {"level": "info", "message": "request", "fields": {"status": 200}, **about}
    assert (uncaught["level"], uncaught["exception"].splitlines()[-1][:17]) == (
        "critical",
        "ZeroDivisionError",
    )
