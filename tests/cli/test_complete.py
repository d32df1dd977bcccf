from __future__ import annotations

import io

import pytest

from penstock.cli.main import main
from tests.cli.conftest import FakeServer, Reply


@pytest.fixture
def text(complete_events: bytes, server: FakeServer) -> str:
    """What the server streams, with the line break that the command adds at its end."""
    server.replies = [Reply(complete_events)]
    return "Author Cleanup ):ATTRIBUTEreek Cleanup ):ATTRIBUTE\n"


def type_in(monkeypatch: pytest.MonkeyPatch, typed: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))


def test_text_goes_to_stdout_and_nothing_else(
    server: FakeServer, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "def main():", "--url", server.url]) == 0
    assert capsys.readouterr() == (text, "")
    assert [path for path, _, _ in server.requests] == ["/v1/models", "/v1/completions"]
    assert server.requests[1][2] == {
        "model": "tiny-llama",
        "prompt": "def main():",
        "max_tokens": 128,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_options_reach_the_request(
    server: FakeServer, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", server.url + "/v1")
    monkeypatch.setenv("PENSTOCK_API_KEY", "sesame")
    line = "complete a --model m --max-tokens 8 --temperature 0 --top-p 0.5 --seed 1 --stats"
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    assert out == text
    assert err.startswith("TTFT ")
    assert "5 prompt tokens, 8 tokens in " in err
    ((path, headers, body),) = server.requests
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer sesame"
    del body["stream"], body["stream_options"]
    assert body == {
        "model": "m",
        "prompt": "a",
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [(b"a\nb\n", "a\nb"), (b"a\n\n", "a\n"), (b"a", "a"), ("é".encode(), "é"), (b" a\r\n", " a\r")],
)
def test_a_dash_reads_the_prompt_from_standard_input(
    server: FakeServer, text: str, monkeypatch: pytest.MonkeyPatch, typed: bytes, prompt: str
) -> None:
    type_in(monkeypatch, typed)
    assert main(["complete", "-", "--url", server.url]) == 0
    assert server.requests[1][2]["prompt"] == prompt


@pytest.mark.parametrize(
    ("typed", "message"),
    [(b"", "standard input is empty"), (b"ab\xff", "standard input is not UTF-8 (byte 2)")],
)
def test_bad_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: bytes, message: str
) -> None:
    type_in(monkeypatch, typed)
    assert main(["complete", "-"]) == 2
    assert capsys.readouterr().err == f"penstock: error: {message}\n"


@pytest.mark.parametrize("line", [["complete"], ["complete", ""], ["complete", "a\udcff"]])
def test_a_prompt_is_needed(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert capsys.readouterr().err.startswith("penstock: error: ")


def test_failures_are_reported_after_the_text_that_came(
    server: FakeServer, complete_events: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    head = complete_events[: complete_events.index(b"\n\n") + 2]
    server.replies = [Reply(head + b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n')]
    assert main(["complete", "a", "--url", server.url, "--stats"]) == 1
    assert capsys.readouterr() == ("Author\n", "penstock: error: the server broke off: engine died\n")


def test_a_server_that_is_not_there(free_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "a", "--url", free_url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"penstock: error: cannot reach a server at {free_url} (")
    assert "name one with --url or PENSTOCK_URL, or start one with: penstock serve" in err


def test_a_refusal_shows_the_message_of_the_server(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(b'{"error": {"message": "prompt too long"}}', status=400)]
    assert main(["complete", "a", "--url", server.url]) == 1
    assert capsys.readouterr().err == "penstock: error: HTTP 400: prompt too long\n"


@pytest.mark.parametrize("tty", [False, True])
def test_a_terminal_is_not_sent_control_characters(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tty: bool
) -> None:
    server.replies = [Reply(b'data: {"choices": [{"text": "\\u001b[2Ja\\tb\\u009bc"}]}\n\ndata: [DONE]\n\n')]
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    assert main(["complete", "a", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert out == ("␛[2Ja\tb\N{REPLACEMENT CHARACTER}c\n" if tty else "\x1b[2Ja\tb\x9bc\n")
