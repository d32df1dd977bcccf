"""TLS to model servers: whom the gateway trusts, and as whom it comes."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from penstock.config.errors import ConfigError
from penstock.gateway.upstream.exchange import UpstreamError
from penstock.gateway.upstream.tls import UpstreamTls
from tests.certificates import Certificates, make
from tests.gateway.upstream.test_connection_pool import ask, http1_server, pool_to, run


def serving(certificates: Certificates, *, asks: bool = False) -> ssl.SSLContext:
    """The context of a model server; ``asks``: for a certificate of the same authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.both)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates.authority)
    return context


def problem(served: ssl.SSLContext, tls: UpstreamTls | None) -> str:
    """Why a request does not get its answer; empty: it does."""
    found: list[str] = []

    async def main() -> None:
        async with http1_server(tls=served) as (url, _), pool_to(url, "off", tls) as pool:
            try:
                await ask(pool)
            except (UpstreamError, AssertionError) as error:
                found.append(str(error))

    run(main)
    return "".join(found)


def test_only_servers_of_the_given_authority_are_trusted(certificates: Certificates, tmp_path: Path) -> None:
    served = serving(certificates)
    assert problem(served, UpstreamTls(ca_file=certificates.authority)) == ""
    for tls in (None, UpstreamTls(ca_file=make(tmp_path).authority)):
        assert "authority is not trusted" in problem(served, tls)


def test_a_server_may_ask_for_a_certificate(certificates: Certificates) -> None:
    served, authority = serving(certificates, asks=True), certificates.authority
    with_key = UpstreamTls(ca_file=authority, cert_file=certificates.both)
    assert problem(served, with_key) == ""
    two = UpstreamTls(ca_file=authority, cert_file=certificates.chain, key_file=certificates.key)
    assert problem(served, two) == ""
    assert problem(served, UpstreamTls(ca_file=authority))


def test_the_name_of_the_certificate(tmp_path: Path) -> None:
    authority, served = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("models.example").configure_cert(served)
    asked: list[str] = []
    served.sni_callback = lambda connection, name, context: asked.append(name)
    ca_file = str(tmp_path / "ca.pem")
    authority.cert_pem.write_to_path(ca_file)
    assert problem(served, UpstreamTls(ca_file=ca_file, server_name="models.example")) == ""
    assert asked == ["models.example"]
    assert "is not for this name" in problem(served, UpstreamTls(ca_file=ca_file))


def test_files_that_are_replaced(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = make(tmp_path)
    used = tmp_path / "used.pem"
    used.write_bytes(Path(certificates.authority).read_bytes())
    tls = UpstreamTls(ca_file=str(used))
    served = serving(renewed)
    assert problem(served, tls)
    used.write_text("nonsense")
    assert problem(serving(certificates), tls) == "", "the old one stays in use"
    assert "the old certificate stays in use" in caplog.text
    used.write_bytes(Path(renewed.authority).read_bytes())
    assert problem(served, tls) == ""
    assert problem(serving(certificates), tls), "the old one is forgotten"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ca_file": "/absent"}, "--upstream-ca-file /absent: .*No such file"),
        ({"ca_file": "{key}"}, "--upstream-ca-file .*key.pem: "),
        ({"cert_file": "{chain}"}, "--upstream-cert-file .*chain.pem: "),
        (
            {"cert_file": "{chain}", "key_file": "{authority}"},
            "--upstream-cert-file .*, --upstream-key-file .*: ",
        ),
    ],
)
def test_files_that_cannot_be_used(certificates: Certificates, files: dict[str, str], words: str) -> None:
    paths = certificates._asdict()
    with pytest.raises(ConfigError, match=words):
        UpstreamTls(**{name: path.format(**paths) for name, path in files.items()})
