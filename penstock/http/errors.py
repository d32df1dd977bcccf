"""HTTP errors with a JSON body in the shape that OpenAI's and vLLM's clients expect.

``{"error": {"message": …, "type": …, "param": …, "code": …}}``: ``type`` is spelled as in vLLM, ``param`` is
the request field at fault, ``code`` is the HTTP status or a more specific string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    417: "ExpectationFailedError",
    426: "UpgradeRequiredError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    505: "HTTPVersionError",
}
"""Default ``type`` by HTTP status."""

MAX_MESSAGE = 1000
"""Maximum characters of an error's message; its middle is left out beyond that."""
MAX_PARAM = 200
"""Maximum characters of ``param``."""
MAX_NAMED = 20
"""Names that an error lists."""
MAX_VALUE = 60
"""Maximum characters of a refused value in a message."""

MALFORMED = "Bad Request"
"""``type``, as in vLLM, of a body that is not JSON or whose fields have wrong JSON types."""

encode_json = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An error reply.

    ``param``: the request field at fault. ``type`` defaults to that of the status, ``code`` to the status.
    ``headers`` are added to the reply. Long messages and params are shortened: they may quote the request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]}…{message[-MAX_MESSAGE // 2 + 1 :]}"
        if param is not None and len(param) > MAX_PARAM:
            param = f"{param[: MAX_PARAM - 1]}…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, TYPES[500])
        self.param = param
        self.code: str | int | None = status if code is None else code
        self.headers = headers

    def fields(self) -> dict[str, str | int | None]:
        """The object under ``error``."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        """The JSON body of the reply, or the data of an error event in a stream."""
        return encode_json({"error": self.fields()})


def shown(value: object) -> str:
    """A refused value for a message, shortened to MAX_VALUE characters."""
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def refused(message: str, param: str, value: object = None) -> ApiError:
    """400 for a field with an invalid value; ``message`` gets vLLM's suffix."""
    suffix = f"(parameter={param})" if value is None else f"(parameter={param}, value={shown(value)})"
    return ApiError(400, f"{message} {suffix}", param=param)


def not_served(field: str, allowed: str) -> ApiError:
    """400 for a known field with an unsupported value; ``allowed`` says which values are supported."""
    return ApiError(400, f"{field} is not supported by this server: {allowed}.", param=field)


def wrong_method(path: str, method: str, allowed: Iterable[str]) -> ApiError:
    """405 for a route that takes the ``allowed`` methods."""
    known = sorted(allowed)
    return ApiError(
        405,
        f"{path} takes {' or '.join(known)}, not {method}.",
        headers=[(b"allow", ", ".join(known).encode())],
    )


def names_in_error(names: Iterable[str]) -> str:
    """The first MAX_NAMED of ``names``, for a message."""
    known = list(names)
    more = f" … ({len(known)} in all)" if len(known) > MAX_NAMED else ""
    return ", ".join(known[:MAX_NAMED]) + more


def unknown_model(name: str, names: Iterable[str]) -> ApiError:
    """404 for a model that is not served, as vLLM words it; ``names``: the served models."""
    message = f"The model `{shown(name)}` does not exist. Valid aliases: {names_in_error(names)}."
    return ApiError(404, message, param="model", code="model_not_found")
