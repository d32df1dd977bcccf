"""Errors a client sees, in the shape OpenAI's clients and vLLM's users expect."""


class ApiError(Exception):
    """A request that ends with an HTTP error.

    ``status`` is the HTTP status, ``type`` the error's class name in the body, ``param`` the request
    field it is about, ``code`` what the body reports as ``code`` (the status when not given).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or "BadRequestError"
        self.param = param
        self.code: str | int | None = status if code is None else code

    def body(self) -> bytes:
        """The JSON body of the reply."""
        raise NotImplementedError
