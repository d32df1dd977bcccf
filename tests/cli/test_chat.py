from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import main
from tests.cli.conftest import FakeServer, Reply

ROOT = Path(penstock.__file__).parents[1]


def stream(*texts: str, done: bool = True) -> bytes:
    """The events of a chat answer."""
    events = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in texts]
    return "".join(f"data: {data}\n\n" for data in [*events, *["[DONE]"] * done]).encode()


def said(server: FakeServer, request: int) -> list[tuple[str, str]]:
    """(role, content) of the messages of one request."""
    return [(message["role"], message["content"]) for message in server.requests[request][2]["messages"]]


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> object:
    """Runs a conversation with these lines on standard input, which is no terminal."""

    def run(typed: str | bytes, *arguments: str) -> int:
        raw = typed if isinstance(typed, bytes) else typed.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        return main(["chat", "--url", server.url, "--model", "m", *arguments])

    return run


def test_quick_sends_one_message(
    server: FakeServer, chat_events: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(chat_events, pieces=5)]
    line = ["chat", "-q", "Say hi", "--system-prompt", "You are terse.", "--url", server.url, "--stats"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert out.startswith("trace htt")
    assert out.endswith(" Cleanup\n")
    assert "23 prompt tokens, 8 tokens in " in err
    assert said(server, 1) == [("system", "You are terse."), ("user", "Say hi")]
    assert "max_tokens" not in server.requests[1][2]


def test_a_conversation_remembers(server: FakeServer, type_in, capsys) -> None:  # type: ignore[no-untyped-def]
    server.replies = [Reply(stream("A", "1")), Reply(stream("A2\n")), Reply(stream("A3"))]
    assert type_in("Q1\n\n  Q2\n/clear\nQ3\n/exit\nQ4\n", "--system-prompt", "S") == 0
    assert capsys.readouterr() == ("A1\nA2\nA3\n", "")
    assert said(server, 1) == [("system", "S"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]
    assert said(server, 2) == [("system", "S"), ("user", "Q3")]
    assert len(server.requests) == 3


def test_without_a_terminal_the_first_failure_ends_it(server: FakeServer, type_in, capsys) -> None:  # type: ignore[no-untyped-def]
    server.replies = [Reply(b'{"error": {"message": "overloaded"}}', status=503)]
    assert type_in("Q1\nQ2\n") == 1
    assert capsys.readouterr() == ("", "penstock: error: HTTP 503: overloaded\n")
    assert len(server.requests) == 1


def test_standard_input_must_be_utf8(server: FakeServer, type_in, capsys) -> None:  # type: ignore[no-untyped-def]
    assert type_in(b"\xff\n") == 2
    assert capsys.readouterr().err == "penstock: error: standard input is not UTF-8\n"


class Terminal:
    """``penstock chat`` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environ = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str) -> str:
        """What is shown up to and with ``text``; what follows is kept."""
        while text not in self.shown:
            received = os.read(self.master, 4096)
            assert received, self.shown
            self.shown += received.decode().replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(server: FakeServer) -> Iterator[Terminal]:
    running = Terminal("--url", server.url)
    yield running
    running.close()


def test_on_a_terminal(server: FakeServer, terminal: Terminal) -> None:
    hold = threading.Event()
    server.replies = [
        Reply(b'{"error": {"message": "overloaded"}}', status=503),
        Reply(stream("endless", done=False), hold=hold, pings=True),
        Reply(stream("finished")),
    ]
    assert f"Talking to tiny-llama at {server.url}" in terminal.read_until("> ")

    terminal.type("Q1\n")
    terminal.read_until("HTTP 503: overloaded")  # reported, and the conversation goes on without it
    terminal.read_until("> ")

    terminal.type("Q2\n")
    terminal.read_until("endless")
    terminal.interrupt()  # ends the answer, which stays in the conversation
    terminal.read_until("> ")
    hold.set()

    terminal.type("Q3\n")
    terminal.read_until("finished")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert said(server, 3) == [("user", "Q2"), ("assistant", "endless"), ("user", "Q3")]


def test_ctrl_c_at_the_prompt_discards_the_line(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter([KeyboardInterrupt, "Q1", EOFError])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    server.replies = [Reply(stream("A1"))]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    assert main(["chat", "--url", server.url]) == 0
    greeting, rest = capsys.readouterr().out.split("\n", 1)
    assert greeting.startswith("Talking to tiny-llama")
    assert rest == "\nA1\n\n"
