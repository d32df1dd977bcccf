"""``penstock status --watch``: refreshes, survives a server that goes away, ends with Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from penstock.cli.main import main
from penstock.cli.status_reading import GatewayReading, Reading
from penstock.cli.status_watch import make_display, watch
from penstock.client import ClientError
from tests.cli.test_status import reading

METRICS = b'penstock:connections{server="0"} 1\n'
COMMAND = (sys.executable, "-m", "penstock.cli.main", "status", "--watch")


def watched(steps: list[Reading | ClientError], *, as_json: bool) -> int:
    """Watch these readings; then comes Ctrl-C."""
    left = iter(steps)

    def read() -> Reading | GatewayReading:
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        if isinstance(step, ClientError):
            raise step
        return step

    return watch(read, make_display(as_json=as_json), interval_s=1.0, sleep=lambda _: None)


STEPS = [
    reading(100, at=1000.0),
    reading(200, at=1001.0),
    ClientError("cannot reach a server"),
    reading(10, at=1010.0, started=1009.0),
]


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(list(STEPS), as_json=False) == 0
    lines = [text.partition(" ")[2] for text in capsys.readouterr().out.splitlines()]
    assert "100.0 tokens/s" in lines[1]
    assert lines[2:4] == ["cannot reach a server", "the server has restarted"]
    assert "tokens/s" not in lines[4]  # no rate over a restart
    assert len(lines) == 5


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(list(STEPS), as_json=True) == 0
    found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [each["kind"] for each in found] == ["server", "server", "error", "server"]
    assert found[-1]["note"] == "the server has restarted"


def test_a_first_reading_that_fails_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClientError):
        watched([ClientError("HTTP 401: no")], as_json=False)
    assert main(["status", "--watch", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot reach a server" in capsys.readouterr().err


def test_a_server_that_loads_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [ClientError("The server is loading the model", status=503), reading(100, at=1000.0)]
    assert watched([*steps], as_json=False) == 0
    lines = [text.partition(" ")[2] for text in capsys.readouterr().out.splitlines()]
    assert lines[0] == "The server is loading the model"
    assert "engines ready" in lines[1]
    with pytest.raises(ClientError):
        watched([steps[0], ClientError("HTTP 401: no", status=401)], as_json=False)


def test_an_interval_of_zero_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "--interval", "0"]) == 2
    assert "--watch" in capsys.readouterr().err


# -- the command, as a process


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server that has one status, for those who have the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret"
            body = msgspec.json.encode({"error": {"message": "a key is needed"}})
            if known:
                body = METRICS if self.path == "/metrics" else msgspec.json.encode(reading(100))
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_in_a_pipe(url: str) -> None:
    command = [*COMMAND, "--url", url, "--api-key", "secret", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    assert "2 of 2 engines ready, 3 running" in first
    assert "2 of 2 engines ready, 3 running" in second


def test_on_a_terminal(url: str) -> None:
    """Tables replace each other."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--url", url, "--api-key", "secret", "--interval", "0.05"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = b""
        while shown.count(b"Penstock 1.2.3") < 2:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    os.close(ours)
    assert b"\x1b[1A" in shown  # the cursor goes up, to write over what is there


def test_a_wrong_key(url: str) -> None:
    ended = subprocess.run([*COMMAND, "--url", url], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "a key is needed" in ended.stderr
