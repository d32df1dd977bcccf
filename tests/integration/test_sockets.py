"""The listening socket: TLS, certificates of clients, and a Unix socket."""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from tests.certificates import Certificates, make
from tests.integration.server import SYNTHETIC, Server, data_of, wait_until
from tests.integration.test_connections import request


def test_tls_streams_and_replies_as_without(certificates: Certificates, tmp_path: Path) -> None:
    options = ("--ssl-certfile", certificates.chain, "--ssl-keyfile", certificates.key)
    options += ("--api-server-count", "2")  # others of these have one API server, which accepts itself
    trust = ssl.create_default_context(cafile=certificates.authority)
    body = {"prompt": "x", "max_tokens": 300, "seed": 7}
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=trust, timeout=60) as client:
            whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            streamed = client.post("/v1/completions", json=body | {"stream": True})
            events = data_of(streamed.text)
            assert events[-1] == "[DONE]"
            openai_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=client)
            again = openai_client.completions.create(model="m", stream=True, **body)
            assert "".join(event.choices[0].text for event in again) == whole
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health", timeout=30)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url.replace('https', 'http')}/health", timeout=30)  # no TLS
        assert httpx.get(f"{server.url}/health", verify=trust, timeout=30).status_code == 200
    assert "Traceback" not in server.log


def test_a_renewed_certificate_is_used_without_a_restart(certificates: Certificates, tmp_path: Path) -> None:
    used, renewed = tmp_path / "used.pem", make(tmp_path)
    used.write_bytes(Path(certificates.both).read_bytes())
    options = ("--ssl-certfile", str(used), "--enable-ssl-refresh")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:

        def check(authority: str) -> None:
            trust = ssl.create_default_context(cafile=authority)
            assert httpx.get(f"{server.url}/health", verify=trust, timeout=30).status_code == 200

        check(certificates.authority)
        used.write_bytes(Path(renewed.both).read_bytes())
        wait_until(lambda: "new connections get the new certificate" in server.log, 60, "the refresh")
        check(renewed.authority)


def test_certificates_of_clients_are_required(certificates: Certificates, tmp_path: Path) -> None:
    options = ("--ssl-certfile", certificates.both, "--ssl-ca-certs", certificates.authority)
    trust = ssl.create_default_context(cafile=certificates.authority)
    with Server(*SYNTHETIC, *options, "--ssl-cert-reqs", "2", directory=tmp_path) as server:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", verify=trust, timeout=30)
        trust.load_cert_chain(certificates.both)
        assert httpx.get(f"{server.url}/health", verify=trust, timeout=30).status_code == 200
    assert "Traceback" not in server.log


def test_a_unix_socket_is_served_by_all_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    options = ("--uds", str(path), "--uds-mode", "600", "--api-server-count", "2")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        assert f"(over the unix socket {path})" in server.log
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url=server.url, timeout=60) as client:
            body = {"prompt": "x", "max_tokens": 5, "stream": True}
            assert data_of(client.post("/v1/completions", json=body).text)[-1] == "[DONE]"
            assert client.get("/health").status_code == 200
            assert client.get("/is_sleeping").status_code == 200
            assert client.get("/is_sleeping", headers={"via": "1.1 proxy"}).status_code == 403
        server.children("api-server")[0].kill()
        assert path.exists()
    assert not os.path.exists(path)


def test_clients_over_tls_that_leave_or_do_not_read_are_noticed(
    certificates: Certificates, tmp_path: Path
) -> None:
    trust = ssl.create_default_context(cafile=certificates.authority)
    options = ("--ssl-certfile", certificates.both, "--max-stream-backlog", "4096")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, verify=trust, timeout=60))
        url = httpx.URL(server.url)

        def ask(**options: object) -> ssl.SSLSocket:
            plain = socket.socket()
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.connect((url.host, url.port))
            connection = stack.enter_context(trust.wrap_socket(plain, server_hostname=url.host))
            body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 1}
            connection.sendall(request(body | options))
            return connection

        def ended(outcome: str) -> bool:
            counted = rf'penstock:requests_total{{.*outcome="{outcome}".*}} [1-9]'
            return re.search(counted, client.get("/metrics").text) is not None

        leaving = ask()
        assert leaving.recv(10)
        leaving.close()  # without TLS's goodbye
        wait_until(lambda: ended("abort"), 60, "the end of the stream whose client left")
        ask(n=64)
        wait_until(lambda: ended("cut"), 60, "cutting the client that does not read")
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    assert "ERROR" not in server.log
