"""What administrative requests say beside what they are for: parameters, a key, and a time-out."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from urllib.parse import parse_qsl

import msgspec

from penstock.http.body_errors import malformed, wrong_type
from penstock.http.errors import ApiError, shown
from penstock.http.repeated_names import check_names
from penstock.http.request import HttpRequest
from penstock.wire.messages import MAX_IDEMPOTENCY_KEY_LENGTH

DEFAULT_TIMEOUT_S = 60.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 3600.0
MAX_PARAMETER_BYTES = 64 << 10
"""Largest body with parameters, which are a few."""

_fields = msgspec.json.Decoder(dict[str, str | int | float | None]).decode


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """Parameters and key of one request."""

    parameters: dict[str, str]
    key: str
    timeout_s: float


def operation_options(http: HttpRequest, *names: str, body: bytes = b"") -> OperationOptions:
    """From the query, which may have ``names`` and ``timeout``, or a JSON ``body`` with these, and the header
    Idempotency-Key. Raises ApiError."""
    parameters = read_parameters(http, body)
    allowed = (*names, "timeout")
    for name in parameters:
        if name not in allowed:
            where = "query" if name in read_parameters(http) else "body"
            known = ", ".join(allowed)
            raise ApiError(400, f"{http.path} takes {known} in its {where}, not {shown(name)!r}.", param=name)
    return OperationOptions(parameters, idempotency_key(http), read_timeout(parameters.get("timeout")))


async def read_parameter_body(http: HttpRequest) -> bytes:
    """The body of a request that needs none; empty: it has none. Raises as :meth:`HttpRequest.read_json`."""
    if http.fields.get(b"content-length") == b"0":
        return b""  # whatever its type: clients name one without a body
    return await http.read_json(MAX_PARAMETER_BYTES)


def read_parameters(http: HttpRequest, body: bytes = b"") -> dict[str, str]:
    """The parameters in the query, and those in the JSON ``body``, an object: numbers as they are written
    there, null for none. Raises ApiError for one that is given twice."""
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(http.query.decode("latin-1"), keep_blank_values=True):
        if name in parameters:
            raise ApiError(400, f"{name} is given twice.", param=name)
        parameters[name] = value
    try:
        fields = _fields(body) if body else {}
        if body:
            check_names(body)
    except msgspec.ValidationError as error:
        raise wrong_type(body, str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(body, error) from None
    for name, given in fields.items():
        value = str(given)
        if given is not None and parameters.setdefault(name, value) != value:
            raise ApiError(
                400,
                f"{name} is {shown(parameters[name])!r} in the query and {shown(value)!r} in the body.",
                param=name,
            )
    return parameters


def idempotency_key(http: HttpRequest) -> str:
    """That of the header, or a generated one. Raises ApiError."""
    key = http.header(b"idempotency-key")
    if key is None:
        return secrets.token_hex(16)
    if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY_LENGTH:
        raise ApiError(
            400,
            f"Idempotency-Key has {len(key)} characters, 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} are allowed.",
            param="Idempotency-Key",
        )
    return key


def read_timeout(given: str | None) -> float:
    """Seconds. Raises ApiError."""
    if given is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
        raise refused_value("timeout", given, f"{MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds")
    return seconds


def refused_value(name: str, value: str, allowed: str) -> ApiError:
    """The error for a value that is not ``allowed``."""
    return ApiError(400, f"{name} is {shown(value)!r}, not {allowed}.", param=name)
