from __future__ import annotations

from hashlib import blake2b, sha256

import pytest

from penstock.http.access_keys import Keys, check_local
from penstock.http.errors import ApiError
from penstock.http.request import first_values
from tests.http.requests import http_request


def refusal(keys: Keys, path: str, *authorization: bytes) -> ApiError | None:
    headers = [(b"host", b"x"), *((b"authorization", value) for value in authorization)]
    try:
        keys.check(path, first_values(headers))
    except ApiError as error:
        return error
    return None


def test_without_keys_everybody_is_let_in() -> None:
    assert refusal(Keys([]), "/v1/models") is None


@pytest.mark.parametrize("sent", [b"Bearer one", b"bearer two", b"BEARER  one "])
def test_every_key_opens(sent: bytes) -> None:
    assert refusal(Keys(["one", "two"]), "/v1/models", sent) is None


@pytest.mark.parametrize("key", ["ключ", "voilà"])
def test_keys_of_any_script_are_sent_as_utf_8(key: str) -> None:
    assert refusal(Keys([key]), "/v1/models", b"Bearer " + key.encode()) is None
    assert refusal(Keys([key]), "/v1/models", b"Bearer " + b"?" * len(key)) is not None
    assert refusal(Keys([key]), "/v1/models", b"Bearer " + key.encode("latin-1", "replace")) is not None


@pytest.mark.parametrize("header", [b"x-api-key", b"api-key"])
@pytest.mark.parametrize(("key", "lets_in"), [(b"two", True), (b"three", False), (b"", False)])
def test_a_header_of_its_own(header: bytes, key: bytes, lets_in: bool) -> None:
    """As Anthropic's and Azure's clients send it; it counts where there is no Authorization."""
    headers = {header: key}
    keys = Keys(["one", "two"])
    if lets_in:
        keys.check("/v1/messages", headers)
        headers[b"authorization"] = b"Bearer three"
    with pytest.raises(ApiError):
        keys.check("/v1/messages", headers)


@pytest.mark.parametrize(
    "sent",
    [b"", b"Bearer", b"Bearer ", b"Bearer tw", b"Bearer two two", b"Basic two", b"two", b"Bearer \xff"],
)
def test_anything_else_does_not(sent: bytes) -> None:
    error = refusal(Keys(["topsecret", "two"]), "/metrics", sent)
    assert error is not None
    assert (error.status, error.type, error.code) == (401, "AuthenticationError", "invalid_api_key")
    assert dict(error.headers) == {b"www-authenticate": b"Bearer", b"x-should-retry": b"false"}
    assert "topsecret" not in error.message


def test_what_is_missing_is_told_from_what_is_wrong() -> None:
    missing, wrong = refusal(Keys(["k"]), "/docs"), refusal(Keys(["k"]), "/docs", b"Bearer x")
    assert missing is not None
    assert missing.message.startswith("An API key is needed")
    assert wrong is not None
    assert wrong.message.startswith("The API key is not valid")
    assert "x-api-key" not in missing.message + wrong.message  # Claude Code would show neither


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_need_no_key(path: str) -> None:
    assert refusal(Keys(["k"]), path) is None
    assert refusal(Keys(["k"]), f"{path}/") is not None


# -- keys of administrators


ADMINS = {"admin_keys": ["root"]}


@pytest.mark.parametrize("path", ["/sleep", "/admin/engines", "/debug/gc"])
@pytest.mark.parametrize("clients", [[], ["k", "l"]])
def test_administrative_routes_need_a_key_of_an_administrator(path: str, clients: list[str]) -> None:
    keys = Keys(clients, **ADMINS)
    assert keys.guards(path)
    assert refusal(keys, path, b"Bearer root") is None
    nobody, stranger = refusal(keys, path), refusal(keys, path, b"Bearer x")
    assert nobody is not None
    assert stranger is not None
    assert (nobody.status, stranger.status) == (401, 401)
    if clients:
        client = refusal(keys, path, b"Bearer k")
        assert client is not None
        assert (client.status, client.code) == (403, "not_admin")
        assert "--admin-api-key-file" in client.message


def test_an_administrator_is_a_client_and_changes_nothing_for_others() -> None:
    alone = Keys(["k"], **ADMINS)
    assert refusal(alone, "/v1/models", b"Bearer root") is None
    assert alone.check("/v1/models", {b"x-api-key": b"k"}) is None, "the only client: no tenant"
    assert alone.check("/v1/models", {b"x-api-key": b"root"}) is not None
    assert refusal(alone, "/v1/models") is not None
    without_clients = Keys([], **ADMINS)
    assert not without_clients.guards("/v1/models")
    assert refusal(without_clients, "/v1/models") is None
    assert refusal(without_clients, "/health") is None


# -- without keys


def local_refusal(
    path: str,
    client: tuple[str, int] | None,
    *headers: bytes,
    unix_socket: bool = False,
    loopback: bool = False,
) -> ApiError | None:
    sent = [(b"host", b"x"), *((name, b"x") for name in headers)]
    try:
        check_local(
            http_request("POST", path.encode(), sent, client=client),
            unix_socket=unix_socket,
            loopback=loopback,
        )
    except ApiError as error:
        return error
    return None


ROUTES = ["/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/start_profile", "/stop_profile"]
HERE = "127.0.0.1", 1
NOT_HERE = (b"origin", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")


@pytest.mark.parametrize("path", [*ROUTES, "/admin/engines", "/admin/engines/0/drain", "/debug/gc"])
def test_administrative_routes_are_for_a_unix_socket(path: str) -> None:
    assert local_refusal(path, None, unix_socket=True) is None
    for client in (HERE, ("10.0.0.1", 1), None):
        error = local_refusal(path, client)
        assert error is not None
        assert (error.status, error.code) == (403, "not_local")
        for word in (path, "--api-key-file", "--uds", "--allow-loopback-admin"):
            assert word in error.message


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/health", "/sleeping", "/docs"])
def test_others_are_for_everybody(path: str) -> None:
    assert local_refusal(path, ("10.0.0.1", 1), b"origin") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_loopback_addresses_if_they_are_trusted(host: str) -> None:
    assert local_refusal("/sleep", (host, 1), loopback=True) is None
    assert local_refusal("/sleep", (host, 1)) is not None, "a proxy may stand there"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:10.0.0.1", "fe80::1%eth0", "169.254.0.1"])
def test_other_addresses(host: str) -> None:
    assert local_refusal("/sleep", (host, 1), loopback=True) is not None


def test_a_connection_that_is_gone_is_from_nowhere() -> None:
    assert local_refusal("/sleep", None, loopback=True) is not None


@pytest.mark.parametrize("header", NOT_HERE)
def test_what_a_page_or_a_proxy_sends_is_not_from_here(header: bytes) -> None:
    assert local_refusal("/sleep", HERE, header, loopback=True) is not None
    assert local_refusal("/sleep", None, header, unix_socket=True) is not None


def tenant(keys: list[str], *headers: tuple[bytes, bytes]) -> str | None:
    return Keys(keys).check("/v1/completions", first_values(headers))


def test_several_keys_are_tenants_which_do_not_reveal_them() -> None:
    one = tenant(["one", "two"], (b"authorization", b"Bearer one"))
    two = tenant(["one", "two"], (b"authorization", b"Bearer two"))
    assert one is not None
    assert two is not None
    assert one != two
    assert len(one) == len(two) == 32
    assert one == tenant(["three", "one"], (b"authorization", b"bearer  one ")), "in every process"
    assert one == tenant(["one", "two"], (b"x-api-key", b"one")), "in either header"
    digests = {sha256(b"one").hexdigest()[:32], blake2b(b"one", digest_size=16).hexdigest()}
    assert one not in digests


@pytest.mark.parametrize("keys", [[], ["one"], ["one", "one"]])
def test_without_several_keys_there_are_no_tenants(keys: list[str]) -> None:
    assert tenant(keys, (b"authorization", b"Bearer one")) is None
