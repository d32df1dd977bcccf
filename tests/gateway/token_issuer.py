"""An issuer of tokens on loopback: discovery and keys over TLS, tokens by PyJWT."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests import certificates

AUDIENCE = "penstock"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
_KINDS = {
    rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
    ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
    ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
}


def public_jwk(key: Any, **fields: Any) -> dict[str, Any]:
    """The public key as JSON Web Key."""
    algorithm = next(value for kind, value in _KINDS.items() if isinstance(key, kind))
    return {**json.loads(algorithm.to_jwk(key.public_key())), "use": "sig", **fields}


def signed(claims: Any, key: Any = RSA, algorithm: str = "RS256", **header: Any) -> str:
    """A token. ``claims`` that are bytes are the payload as it is."""
    payload = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    return jwt.PyJWS().encode(payload, key, algorithm, headers=header)


class Issuer:
    """An issuer whose keys the test replaces."""

    def __init__(self, port: int) -> None:
        self.url = f"https://127.0.0.1:{port}"
        self.keys: dict[str, Any] = {"first": RSA}
        self.asked: list[str] = []
        """Paths, in order."""
        self.down = False
        self.gate = threading.Event()
        """Replies wait for it."""
        self.gate.set()

    def claims(self, **claims: Any) -> dict[str, Any]:
        now = int(time.time())
        return {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "exp": now + 600, "iat": now} | claims

    def token(self, kid: str = "first", **claims: Any) -> str:
        return signed(self.claims(**claims), self.keys.get(kid, RSA), kid=kid)

    def reply(self, path: str) -> tuple[int, bytes]:
        if self.down:
            return 503, b""
        if path == "/.well-known/openid-configuration":
            return 200, json.dumps({"issuer": self.url, "jwks_uri": f"{self.url}/keys"}).encode()
        keys = [public_jwk(key, kid=kid) for kid, key in self.keys.items()]
        return (200, json.dumps({"keys": keys}).encode()) if path == "/keys" else (404, b"")


@contextlib.contextmanager
def issuer(directory: Path) -> Iterator[tuple[Issuer, str]]:
    """An issuer, and the file with the authority of its certificate."""
    made = certificates.make(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            served.gate.wait(30)
            status, body = served.reply(self.path)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # none outlives the test
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.chain, made.key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    served = Issuer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served, made.authority
    finally:
        served.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
