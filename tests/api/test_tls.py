import ssl
from pathlib import Path

import pytest
import trustme
from certificates import Certificates
from cryptography.hazmat.primitives import serialization

from penstock.api.tls import server_context
from penstock.config.errors import ConfigError
from penstock.config.options import ServeConfig


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
        ({"ssl_certfile": "/absent.pem"}, "--ssl-certfile /absent.pem: .*No such file"),
        ({"ssl_certfile": "{chain}"}, "--ssl-certfile .*chain.pem: "),
        ({"ssl_certfile": "{chain}", "ssl_keyfile": "{other}"}, "--ssl-keyfile .*other.*: .*KEY_VALUES_MISM"),
        ({"ssl_certfile": "{both}", "ssl_cert_reqs": 1}, "need each other"),
        ({"ssl_certfile": "{both}", "ssl_ca_certs": "{authority}"}, "need each other"),
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
