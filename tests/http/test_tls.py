from __future__ import annotations

import contextlib
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.http.tls import server_context, watched_certificate
from tests.certificates import Certificates


def test_off_by_default() -> None:
    assert server_context(ServeConfig()) is None


def test_certificate_and_key_in_one_file_or_two(certificates: Certificates) -> None:
    two = {"ssl_certfile": certificates.chain, "ssl_keyfile": certificates.key}
    for options in (two, {"ssl_certfile": certificates.both}):
        context = server_context(ServeConfig(**options))
        assert context is not None
        assert context.verify_mode == ssl.CERT_NONE
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("reqs", "mode"), [(1, ssl.CERT_OPTIONAL), (2, ssl.CERT_REQUIRED)])
def test_certificates_of_clients(certificates: Certificates, reqs: int, mode: ssl.VerifyMode) -> None:
    config = ServeConfig(
        ssl_certfile=certificates.both, ssl_ca_certs=certificates.authority, ssl_cert_reqs=reqs
    )
    context = server_context(config)
    assert context is not None
    assert context.verify_mode == mode
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile key.pem: .*--ssl-certfile"),
        ({"ssl_ca_certs": "ca.pem"}, "--ssl-ca-certs ca.pem: .*--ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2: .*--ssl-certfile"),
        ({"enable_ssl_refresh": True}, "--enable-ssl-refresh: .*--ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 1}, "--ssl-cert-reqs 1: needs --ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_ca_certs": "a"}, "--ssl-ca-certs a: needs --ssl-cert-reqs 1 or 2"),
    ],
)
def test_options_that_need_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServeConfig(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_certfile": "/absent.pem"}, "--ssl-certfile /absent.pem: .*No such file"),
        ({"ssl_certfile": "{chain}"}, "--ssl-certfile .*chain.pem: "),
        ({"ssl_certfile": "{chain}", "ssl_keyfile": "{other}"}, "--ssl-keyfile .*other.*: .*KEY_VALUES_MISM"),
        (
            {"ssl_certfile": "{both}", "ssl_cert_reqs": 1, "ssl_ca_certs": "/absent.pem"},
            "--ssl-ca-certs /abs",
        ),
    ],
)
def test_options_that_cannot_be_served(
    certificates: Certificates, tmp_path: Path, options: dict[str, str | int], words: str
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(str(other))
    paths = certificates._asdict() | {"other": other}
    filled = {
        name: value.format(**paths) if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(ConfigError, match=words):
        server_context(ServeConfig(**filled))


@pytest.mark.parametrize("option", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_pipe_is_not_waited_for(certificates: Certificates, tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    options = {"ssl_certfile": certificates.both, option: str(tmp_path / "pipe")}
    with pytest.raises(ConfigError, match="/pipe: it is a pipe, not a file"):
        server_context(ServeConfig(ssl_cert_reqs=int(option == "ssl_ca_certs"), **options))


def test_a_key_with_a_password_is_refused_instead_of_asked_for(
    certificates: Certificates, tmp_path: Path
) -> None:
    key = serialization.load_pem_private_key(Path(certificates.key).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"topsecret"),
        )
    )
    config = ServeConfig(ssl_certfile=certificates.chain, ssl_keyfile=str(locked))
    with pytest.raises(ConfigError, match=r"locked\.pem: the private key has a password"):
        server_context(config)


def served(context: ssl.SSLContext) -> bytes:
    """The certificate that a client of ``context`` is shown, without a connection."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_a_new_certificate_is_used_once_its_files_fit_together(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(Path(certificates.chain).read_bytes())
    key.write_bytes(Path(certificates.key).read_bytes())
    config = ServeConfig(ssl_certfile=str(chain), ssl_keyfile=str(key), enable_ssl_refresh=True)
    context = server_context(config)
    assert context is not None
    watch = watched_certificate(context, config)
    assert watch is not None
    before = served(context)
    watch.latest()
    new = trustme.CA().issue_cert("127.0.0.1")
    for number, part in enumerate(new.cert_chain_pems):
        part.write_to_path(str(chain), append=number > 0)
    watch.latest()
    assert served(context) == before
    assert "the old certificate stays in use" in caplog.text
    key.unlink()
    watch.latest()
    assert served(context) == before
    new.private_key_pem.write_to_path(str(key))
    watch.latest()
    assert ssl.DER_cert_to_PEM_cert(served(context)).encode() == new.cert_chain_pems[0].bytes()
