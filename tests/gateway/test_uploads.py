"""Bodies that are only relayed go to the model server as they come: any size, little memory, no copy."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.gateway.processes import WAIT_S, Gateway, closed_port, eventually, gateway, outcome_of
from tests.gateway.upload_server import Got, Handler, UploadServer, takes_all

MIB = 1 << 20
PLAIN = ("--upstream-http2", "off")
JSON = {"content-type": "application/json"}
BINARY = {"content-type": "application/octet-stream"}
BOUNDARY = b"--x"
FORM = {"content-type": "multipart/form-data; boundary=x"}
MODEL = BOUNDARY + b'\r\ncontent-disposition: form-data; name="model"\r\n\r\nchat\r\n'
FILE = BOUNDARY + b'\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'


def blocks(size: int) -> Iterator[bytes]:
    """A body of ``size`` bytes, no two MiB of which are equal."""
    for number in range(size // MIB):
        yield number.to_bytes(8, "big") * (MIB // 8)


def digest(size: int) -> str:
    whole = hashlib.sha256()
    for block in blocks(size):
        whole.update(block)
    return whole.hexdigest()


def peak(front: Gateway) -> int:
    """Bytes of memory that its worker has had at most."""
    with open(f"/proc/{front.workers[0].pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def resident(front: Gateway) -> int:
    return int(psutil.Process(front.workers[0].pid).memory_info().rss)


def large_reply(handler: Handler, got: Got) -> None:
    handler.pieces(got)
    handler.answer(200, size=got.size)
    for block in blocks(got.size - 2):
        handler.wfile.write(block)
    handler.wfile.write(b"x" * ((got.size - 2) % MIB))


@pytest.fixture(scope="module")
def server() -> Iterator[UploadServer]:
    with UploadServer() as made:
        yield made


@pytest.fixture(scope="module")
def front(server: UploadServer) -> Iterator[Gateway]:
    options = (*PLAIN, "--model-rewrite", "chat=whisper-large", "--max-request-bytes", str(4 * MIB))
    with gateway(server.url, options=options) as made:
        yield made


@pytest.fixture(autouse=True)
def anew(server: UploadServer) -> None:
    server.behaviour = takes_all
    server.got.clear()


def connect(front: Gateway, timeout: float = WAIT_S) -> socket.socket:
    url = httpx.URL(front.url)
    return socket.create_connection((url.host, url.port or 80), timeout)


def head_of(size: int) -> bytes:
    return b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size


def test_a_large_body_takes_little_memory_over_either_version_of_http(server: UploadServer) -> None:
    """The outer gateway speaks HTTP/2 to the inner one. The reply is as large."""
    server.behaviour = large_reply
    with gateway(server.url, options=PLAIN) as inner, gateway(inner.url) as outer:
        outer.client.get("/v1/models")
        before = [resident(each) for each in (inner, outer)]
        for size, headers in ((96 * MIB, {"content-length": str(96 * MIB)}), (32 * MIB, {})):
            server.got.clear()
            with outer.client.stream(
                "POST", "/v1/files", content=blocks(size), headers={**BINARY, **headers}
            ) as reply:
                assert reply.status_code == 200
                assert sum(map(len, reply.iter_raw(MIB))) == size
            [got] = server.got
            assert got.size == size
            assert got.headers.get("content-length") == headers.get("content-length")
        assert got.digest.hexdigest() == digest(size)
        assert "HTTP/2" in "".join(outer.lines)
        for each, was in zip((inner, outer), before, strict=True):
            assert peak(each) - was < 32 * MIB


def test_a_server_that_reads_slowly_stops_its_client(server: UploadServer, front: Gateway) -> None:
    go = threading.Event()

    def waits(handler: Handler, got: Got) -> None:
        go.wait(WAIT_S)
        takes_all(handler, got)

    server.behaviour = waits
    before = peak(front)
    with connect(front, timeout=0.5) as client:
        client.sendall(head_of(64 * MIB))
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 * MIB:
                sent += client.send(bytes(MIB))
        assert sent < 32 * MIB, "what the kernel holds"
        assert peak(front) - before < 8 * MIB
        go.set()
        client.settimeout(WAIT_S)
        client.sendall(bytes(64 * MIB - sent))
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert server.got[0].size == 64 * MIB


def test_the_model_of_a_form_is_found_and_replaced_wherever_it_stands(
    server: UploadServer, front: Gateway
) -> None:
    parts = [MODEL, FILE + bytes(3 * MIB) + b"\r\n"]
    for ordered in (parts, parts[::-1]):
        body = b"".join(ordered) + BOUNDARY + b"--\r\n"
        assert front.client.post("/v1/audio/transcriptions", content=body, headers=FORM).status_code == 200
        got = server.got.pop()
        assert got.digest.digest() == hashlib.sha256(body.replace(b"chat", b"whisper-large")).digest()
    large = FILE + bytes(5 * MIB) + b"\r\n" + MODEL + BOUNDARY + b"--\r\n"
    refused = front.client.post("/v1/audio/transcriptions", content=large, headers=FORM)
    assert refused.status_code == 413
    assert "Send it before the file" in refused.json()["error"]["message"]
    assert not server.got
    assert front.client.post("/v1/files", content=large, headers=FORM).status_code == 200
    eventually(lambda: any('"target_model": "whisper-large"' in line for line in front.lines))


@pytest.mark.parametrize("status", [401, 413])
def test_an_early_answer_is_relayed_and_nothing_more_is_read(
    server: UploadServer, front: Gateway, status: int
) -> None:
    def refuses(handler: Handler, got: Got) -> None:
        handler.answer(status, b'{"error":{"message":"no"}}')
        handler.close_connection = True

    def post() -> None:
        with connect(front) as client:
            client.sendall(head_of(512 * MIB) + bytes(MIB))
            assert client.recv(4096).startswith(b"HTTP/1.1 %d " % status)

    server.behaviour = refuses
    assert outcome_of(front, post) == "client_error"
    assert server.got[0].size == 0


def test_a_client_that_leaves_while_it_sends_is_no_fault_of_the_server(
    server: UploadServer, front: Gateway
) -> None:
    def leave() -> None:
        with connect(front) as client:
            client.sendall(head_of(8 * MIB) + bytes(MIB))
            eventually(lambda: bool(server.got) and server.got[0].size > 0)

    assert outcome_of(front, leave) == "client_disconnect"
    assert any("the request body is incomplete" in line for line in front.lines)
    assert front.counts("endpoint_up") == {server.url: 1}


def test_a_body_whose_rest_was_sent_goes_to_no_other_server() -> None:
    def breaks(handler: Handler, got: Got) -> None:
        handler.rfile.read(4 * MIB)
        handler.close_connection = True

    body = bytes(16 * MIB)
    with UploadServer(breaks) as one, UploadServer(breaks) as other:
        with gateway(one.url, other.url, options=PLAIN) as front:
            reply = front.client.post("/v1/audio/translations", content=body, headers=BINARY)
            assert reply.status_code == 502
            assert reply.json()["error"]["code"] == "upstream_failed"
            assert len(one.got) + len(other.got) == 1
        with gateway(closed_port(), one.url, options=PLAIN) as front:
            one.behaviour = takes_all
            for _ in range(4):
                assert front.client.post("/v1/files", content=body, headers=BINARY).status_code == 200


def picture_chat(model: str, *, first: bool) -> bytes:
    """2 MB of JSON: an openai client writes the model last."""
    url = "data:image/png;base64," + "QUJD" * (MIB // 2)
    fields = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    body = {"model": model, **fields} if first else {**fields, "model": model}
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize(("model", "sent"), [("chat", "whisper-large"), ("other", "other")])
def test_pictures_in_json_reach_the_server_as_they_were(
    server: UploadServer, front: Gateway, model: str, sent: str
) -> None:
    """Also if the model has another name there, wherever it stands."""
    for first in (True, False):
        body = picture_chat(model, first=first)
        reply = front.client.post("/v1/chat/completions", content=body, headers=JSON)
        assert reply.status_code == 200, reply.text
        got = server.got.pop()
        expected = picture_chat(sent, first=first)
        assert got.digest.digest() == hashlib.sha256(expected).digest()
        assert int(got.headers["content-length"]) == got.size


def test_json_goes_on_as_it_comes_and_ends_only_if_all_of_it_may(
    server: UploadServer, front: Gateway
) -> None:
    body = picture_chat("other", first=True)
    for end, status in ((b"}", b"200"), (b',"model":"third"}', b"400")):
        server.got.clear()
        whole = body[:-1] + end
        with connect(front) as client:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(whole)
            client.sendall(head + whole[:MIB])
            eventually(lambda: bool(server.got) and server.got[0].size > 0)
            client.sendall(whole[MIB:])
            assert client.recv(4096).startswith(b"HTTP/1.1 %b " % status)
        assert (server.got[0].size == len(whole)) is (status == b"200")
    assert front.counts("endpoint_up") == {server.url: 1}


def test_the_bound_of_relayed_bodies_is_its_own(server: UploadServer) -> None:
    options = (*PLAIN, "--max-request-bytes", "100000", "--max-relayed-bytes", str(2 * MIB))
    with gateway(server.url, options=options) as front:

        def status(content: bytes | Iterator[bytes], kind: str) -> int:
            headers = {"content-type": kind}
            reply = front.client.post("/v1/files", content=content, headers=headers)
            if reply.status_code == 413:
                assert reply.json()["error"]["code"] == "too_large"
            return reply.status_code

        assert status(bytes(2 * MIB), "audio/wav") == 200
        assert status(bytes(2 * MIB + 1), "audio/wav") == 413
        assert len(server.got) == 1, "its length was enough"
        assert status(blocks(2 * MIB), "audio/wav") == 200
        assert status(blocks(3 * MIB), "audio/wav") == 413
        assert status(b'{"a": "' + bytes(200_000), "application/json") == 413
        assert sum(front.counts("rejection_total").values()) == front.counts("rejection_total")["too_large"]
