"""The field ``include`` of a request: what items of the output have besides."""

from __future__ import annotations

from penstock.dialects.responses.request_schema import ResponseRequest
from penstock.http.errors import ApiError, shown

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
INCLUDABLE = (
    ENCRYPTED,
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of ``include``; those after the first two are of hosted tools, which make no items here."""


def included_fields(request: ResponseRequest) -> frozenset[str]:
    """What is to be included. Raises ApiError."""
    for number, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            field = f"include[{number}]"
            allowed = ", ".join(INCLUDABLE)
            raise ApiError(400, f"{field} must be one of {allowed}, got {shown(name)!r}.", param=field)
    return frozenset(request.include or ())
