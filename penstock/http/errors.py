"""Errors a client sees, in the shape OpenAI's clients and vLLM's users expect.

``{"error": {"message": …, "type": …, "param": …, "code": …}}``: ``type`` is vLLM's spelling for the same
condition, ``param`` the request field at fault, ``code`` the HTTP status unless a string says more.
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
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""``type`` by HTTP status, where an error does not name its own."""

MALFORMED = "Bad Request"
"""``type`` of a body that is not JSON or whose fields have the wrong JSON types, as vLLM spells it."""

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """A request that ends with an HTTP error.

    ``param`` is the request field at fault; ``type`` defaults to the status' own, ``code`` to the status;
    ``headers`` go out with the reply.
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
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, TYPES[500])
        self.param = param
        self.code: str | int | None = status if code is None else code
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body of the reply; also what follows ``data: `` when the reply is a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return _encode({"error": error})


def refused(message: str, param: str, value: object = None) -> ApiError:
    """A field with a value that is not allowed; ``message`` gets vLLM's suffix."""
    suffix = f"(parameter={param})" if value is None else f"(parameter={param}, value={value})"
    return ApiError(400, f"{message} {suffix}", param=param)


def not_served(field: str, allowed: str) -> ApiError:
    """A known field with a value that this server does not support; ``allowed`` says which ones it does."""
    return ApiError(400, f"{field} is not supported by this server: {allowed}.", param=field)


def unknown_model(name: str, names: Iterable[str]) -> ApiError:
    """A model that is not served; ``names`` are."""
    known = ", ".join(names)
    message = f"The model `{name}` does not exist. Valid aliases: {known}."
    return ApiError(404, message, param="model", code="model_not_found")
