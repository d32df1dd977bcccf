"""A gateway that speaks TLS with its clients and with model servers, which is another gateway here."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.certificates import Certificates, make
from tests.gateway.behaviours import good
from tests.gateway.processes import WAIT_S, Gateway, Upstream, eventually, gateway


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


@pytest.fixture(scope="module")
def trust(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.authority)
    context.load_cert_chain(certificates.both)
    return context


@pytest.fixture(scope="module")
def locked(
    upstream: Upstream,
    certificates: Certificates,
    trust: ssl.SSLContext,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    """It requires certificates of its clients. Its own is in ``used.pem``."""
    used = tmp_path_factory.mktemp("tls") / "used.pem"
    used.write_bytes(Path(certificates.both).read_bytes())
    options = ("--ssl-certfile", str(used), "--enable-ssl-refresh")
    options += ("--ssl-ca-certs", certificates.authority, "--ssl-cert-reqs", "2")
    with gateway(upstream, options=options, verify=trust) as running:
        yield running


def test_clients_over_tls(locked: Gateway, trust: ssl.SSLContext, certificates: Certificates) -> None:
    assert locked.url.startswith("https://")
    assert locked.complete().text.endswith("data: [DONE]\n\n")
    with httpx.Client(base_url=locked.url, verify=trust, http2=True, timeout=WAIT_S) as client:
        reply = client.post("/v1/completions", json={"prompt": "p", "stream": True})
        assert reply.http_version == "HTTP/2"
        assert reply.text.endswith("data: [DONE]\n\n")
    for context in (
        ssl.create_default_context(),
        ssl.create_default_context(cafile=certificates.authority),
    ):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{locked.url}/health", verify=context, timeout=WAIT_S)


def test_model_servers_over_tls(locked: Gateway, certificates: Certificates) -> None:
    trusting = ("--upstream-ca-file", certificates.authority)
    known = ("--upstream-cert-file", certificates.chain, "--upstream-key-file", certificates.key)
    with gateway(locked.url, options=(*trusting, *known, "--scrape-interval", "0.1")) as front:
        assert front.complete().text.endswith("data: [DONE]\n\n")
        assert front.counts() == {"ok": 1.0}
        assert front.counts("endpoint_up") == {locked.url: 1.0}
    for url, options, problem in (
        (locked.url, (), "TLS: the certificate's authority is not trusted"),
        (
            locked.url,
            (*trusting, "--upstream-server-name", "a.example"),
            "TLS: the certificate is not for this name",
        ),
        (locked.url.replace("https:", "http:"), (), "a server that speaks TLS wants https://"),
        (locked.url.replace("https:", "http:"), ("--upstream-http2", "off"), "speaks TLS wants https://"),
    ):
        with gateway(url, options=options) as front:
            reply = front.complete()
            assert reply.status_code == 502
            assert problem in reply.json()["error"]["message"]


def test_a_certificate_that_is_renewed(locked: Gateway, tmp_path: Path) -> None:
    renewed = make(tmp_path)
    (command,) = [word for word in locked.process.args if str(word).endswith("used.pem")]
    Path(command).write_bytes(Path(renewed.both).read_bytes())
    eventually(lambda: "new connections get the new certificate" in "".join(locked.lines))


def test_files_that_cannot_be_used(upstream: Upstream) -> None:
    with (
        pytest.raises(AssertionError, match=r"--upstream-ca-file /absent: .*No such file"),
        gateway(upstream, options=("--upstream-ca-file", "/absent", "--endpoints", "https://a")),
    ):
        pass


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "TLS: the server does not speak it here"),
        (b"", "TLS"),
    ],
)
def test_a_model_server_without_tls(answer: bytes, problem: str) -> None:
    """One that answers, and one that waits for the end of a line."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                held.append(connection)
                if answer:
                    connection.recv(4096)
                    connection.sendall(answer)

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with gateway(url, options=("--connect-timeout", "0.5")) as front:
            assert problem in front.complete().json()["error"]["message"]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()
