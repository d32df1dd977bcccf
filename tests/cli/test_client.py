from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.client import Answer, Client, ClientError, _until_done
from tests import certificates
from tests.cli.conftest import FakeServer, Reply, handler_for

COMPLETE_TEXT = "Author Cleanup ):ATTRIBUTE"


def recorded_text(events: bytes) -> str:
    """The text of a recorded stream, read without the client."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def test_an_endless_event_is_an_error() -> None:
    with pytest.raises(ClientError, match="an event of more than"):
        list(_until_done(iter([b"data: " + b"x" * (16 << 20)])))


@pytest.mark.parametrize("pieces", [1, 7, 100_000])
def test_a_completion_streams_whole(server: FakeServer, complete_events: bytes, pieces: int) -> None:
    server.replies = [Reply(complete_events, pieces=pieces)]
    with Client(server.url + "/v1/", api_key="sesame") as client:
        answer = client.complete("tiny-llama", "def main():\n", {"max_tokens": 8})
        texts = list(answer)
    assert "".join(texts) == answer.text == recorded_text(complete_events)
    assert answer.text.startswith(COMPLETE_TEXT)
    assert len(texts) == 8
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    assert answer.finish_reason == "length"
    assert answer.first is not None
    assert answer.ended is not None
    assert answer.started <= answer.first <= answer.ended
    path, headers, body = server.requests[0]
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer sesame"
    assert body == {
        "model": "tiny-llama",
        "prompt": "def main():\n",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_streams_whole(server: FakeServer, chat_events: bytes) -> None:
    server.replies = [Reply(chat_events)]
    messages = [{"role": "user", "content": "Say hi"}]
    with Client(server.url) as client:
        answer = client.chat("tiny-llama", messages, {})
        assert "".join(answer) == recorded_text(chat_events) != ""
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body["messages"] == messages


def test_the_model_is_the_first_one_listed(server: FakeServer) -> None:
    with Client(server.url) as client:
        assert client.model() == "tiny-llama"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(b'{"object": "list", "data": []}'), "lists no model"),
        (Reply(b"<html>"), "/v1/models does not answer like an OpenAI server"),
        (Reply(b"[]"), "/v1/models does not answer like an OpenAI server"),
        (
            Reply(b'{"error": {"message": "no key"}}', status=401),
            r"^HTTP 401: no key \(give a key with --api-key",
        ),
    ],
)
def test_models_that_cannot_be_listed(server: FakeServer, reply: Reply, message: str) -> None:
    server.models = reply
    with Client(server.url) as client, pytest.raises(ClientError, match=message):
        client.model()


def failure(server: FakeServer, reply: Reply) -> tuple[str, Answer]:
    """The message of the error that ``reply`` leads to, and the answer up to there."""
    server.replies = [reply]
    with Client(server.url, timeout=30) as client:
        answer = client.complete("m", "p", {})
        with pytest.raises(ClientError) as caught:
            list(answer)
    return str(caught.value), answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"error": {"message": "The model `m` does not exist.", "code": 404}}',
            "The model `m` does not exist.",
        ),
        (b'{"error": "out of order"}', "out of order"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"Bad \xff Gateway", "Bad \N{REPLACEMENT CHARACTER} Gateway"),
        (b"", "no message"),
        (b"x" * 5000, "x" * 2000 + "…"),
    ],
)
def test_a_refusal_shows_the_message_of_the_server(server: FakeServer, body: bytes, message: str) -> None:
    assert failure(server, Reply(body, status=404))[0] == f"HTTP 404: {message}"


@pytest.mark.parametrize(
    "error", [b'{"error": {"message": "engine died", "code": 500}}', b'{"error": "engine died"}']
)
def test_an_error_event_is_an_error_after_the_text_before_it(
    server: FakeServer, complete_events: bytes, error: bytes
) -> None:
    head = complete_events[: complete_events.index(b"\n\n") + 2]
    message, answer = failure(server, Reply(head + b"data: " + error + b"\n\ndata: [DONE]\n\n"))
    assert message == "the server broke off: engine died"
    assert answer.text == "Author"


@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_without_done_is_an_error(server: FakeServer, complete_events: bytes, cut: bool) -> None:
    reply = Reply(complete_events.removesuffix(b"data: [DONE]\n\n"), cut=cut)
    message, answer = failure(server, reply)
    expected = "broke the connection" if cut else "ended the stream before [DONE]"
    assert expected in message
    assert answer.text == recorded_text(complete_events)
    assert answer.ended is None


def test_an_event_that_is_not_json_is_an_error(server: FakeServer) -> None:
    assert "an event that cannot be read" in failure(server, Reply(b"data: {]\n\n"))[0]


def test_a_reply_that_is_no_event_stream_is_an_error(server: FakeServer) -> None:
    message, _ = failure(server, Reply(b"<html>", content_type="text/html"))
    assert message == f"{server.url}/v1/completions answered with text/html, not with an event stream"


def test_a_silent_server_is_given_up(server: FakeServer) -> None:
    hold = threading.Event()
    server.replies = [Reply(b": wait\n\n", hold=hold)]
    with (
        Client(server.url, timeout=0.5) as client,
        pytest.raises(ClientError, match=r"was silent for 0\.5 s"),
    ):
        list(client.complete("m", "p", {}))
    hold.set()


def test_leaving_early_closes_the_stream(server: FakeServer, complete_events: bytes) -> None:
    server.replies = [Reply(complete_events), Reply(complete_events)]
    with Client(server.url) as client:
        pieces = iter(client.complete("m", "p", {}))
        assert next(pieces) == "Author"
        pieces.close()
        assert "".join(client.complete("m", "p", {})) == recorded_text(complete_events)


def test_a_server_that_is_not_there(free_url: str) -> None:
    with Client(free_url) as client, pytest.raises(ClientError) as caught:
        client.model()
    port = free_url.rpartition(":")[2]
    assert str(caught.value).startswith(f"cannot reach a server at {free_url} (")
    assert str(caught.value).endswith(f"or start one with: penstock serve --port {port}")


def test_a_proxy_does_not_stand_before_this_machine(
    server: FakeServer, free_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", free_url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with Client(server.url) as client:
        assert client.model() == "tiny-llama"


@pytest.fixture
def tls_url(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server whose certificate is from the authority in ``authority.pem`` of ``tmp_path``."""
    made = certificates.make(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.both)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_for(server)) as secure:
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        secure.handle_error = lambda *_: None  # type: ignore[method-assign]  # refused handshakes
        thread = threading.Thread(target=secure.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        yield f"https://127.0.0.1:{secure.server_port}"
        secure.shutdown()
        thread.join()


def test_a_certificate_of_a_private_authority(
    tls_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(tls_url) as client, pytest.raises(ClientError) as caught:
        client.model()
    assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value)
    assert "; TLS: the certificate's authority is not trusted: " in str(caught.value)
    assert str(caught.value).endswith("; name a file with it in SSL_CERT_FILE")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    with Client(tls_url) as client:
        assert client.model() == "tiny-llama"
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent.pem"))
    with pytest.raises(ClientError, match=r"SSL_CERT_FILE.*absent\.pem"):
        Client(tls_url)


def test_a_server_with_tls_is_asked_without(tls_url: str) -> None:
    with Client(tls_url.replace("https:", "http:")) as client, pytest.raises(ClientError) as caught:
        client.model()
    assert "does it speak TLS: https:// rather than http://?" in str(caught.value)


def test_a_server_without_tls_is_there(server: FakeServer) -> None:
    url = server.url.replace("http:", "https:")
    with Client(url) as client, pytest.raises(ClientError) as caught:
        client.model()
    assert "start one with" not in str(caught.value)
    assert "; TLS: the server does not speak it here" in str(caught.value)
    assert str(caught.value).endswith(": http:// instead?")


@pytest.mark.parametrize("url", ["http://[::1", "http://a:b"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ClientError, match="is not a URL"):
        Client(url)


def test_stats_of_an_answer(server: FakeServer, complete_events: bytes) -> None:
    server.replies = [Reply(complete_events), Reply(b"data: [DONE]\n\n")]
    with Client(server.url) as client:
        answer, empty = client.complete("m", "p", {}), client.complete("m", "p", {})
        list(answer)
        list(empty)
    answer.started, answer.first, answer.ended = 10.0, 10.25, 12.0
    assert answer.stats() == (
        "TTFT 250.0 ms, 5 prompt tokens, 8 tokens in 2.00 s, 4.0 tokens/s, finish reason length"
    )
    empty.started, empty.ended = 10.0, 12.0
    assert empty.stats() == "TTFT -, 2.00 s, tokens not reported by the server"


def test_errors_hide_a_password() -> None:
    shown = r"cannot reach a server at http://\*\*\*@127.0.0.1:1 "
    with Client("http://u:pw@127.0.0.1:1") as client, pytest.raises(ClientError, match=shown):
        client.model()
    with pytest.raises(ClientError, match=r"^'http://\*\*\*@a' is not a URL$"):
        Client("http://u:p/w@a")
