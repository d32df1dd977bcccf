import pytest

from penstock.api.access import Keys
from penstock.api.errors import ApiError


def refusal(keys: Keys, path: str, *authorization: bytes) -> ApiError | None:
    scope = {"headers": [(b"host", b"x"), *((b"authorization", value) for value in authorization)]}
    try:
        keys.check(path, scope)
    except ApiError as error:
        return error
    return None


def test_without_keys_everybody_is_let_in() -> None:
    assert refusal(Keys([]), "/v1/models") is None


@pytest.mark.parametrize("sent", [b"Bearer one", b"bearer two", b"BEARER  one "])
def test_every_key_opens(sent: bytes) -> None:
    assert refusal(Keys(["one", "two"]), "/v1/models", sent) is None


@pytest.mark.parametrize(
    "sent",
    [b"", b"Bearer", b"Bearer ", b"Bearer tw", b"Bearer two two", b"Basic two", b"two", b"Bearer \xff"],
)
def test_anything_else_does_not(sent: bytes) -> None:
    error = refusal(Keys(["topsecret", "two"]), "/metrics", sent)
    assert error is not None
    assert (error.status, error.type, error.code) == (401, "AuthenticationError", "invalid_api_key")
    assert error.headers == [(b"www-authenticate", b"Bearer")]
    assert "topsecret" not in error.message


def test_what_is_missing_is_told_from_what_is_wrong() -> None:
    missing, wrong = refusal(Keys(["k"]), "/docs"), refusal(Keys(["k"]), "/docs", b"Bearer x")
    assert missing is not None
    assert missing.message.startswith("An API key is needed")
    assert wrong is not None
    assert wrong.message.startswith("The API key is not valid")


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_need_no_key(path: str) -> None:
    assert refusal(Keys(["k"]), path) is None
    assert refusal(Keys(["k"]), f"{path}/") is not None
