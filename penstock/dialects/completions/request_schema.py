"""The request body of ``/v1/completions``: its fields, and which of them are unsupported."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.generation.request.schemas import GenerateRequest, PromptToken, about
from penstock.generation.request.unsupported import COMMON, UnsupportedField, absent

# For /openapi.json only; other code checks it and has its own error messages.
_NOT_EMPTY = {"minLength": 1, "minItems": 1}


class CompletionRequest(GenerateRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | PromptToken | list[PromptToken]] | None,
        about(
            "A text, a list of texts, a list of token ids, or a list of lists of token ids.",
            extra_json_schema=_NOT_EMPTY,
        ),
    ] = None
    logprobs: Annotated[int | None, about("Alternatives to return per token.")] = None
    suffix: str | None = None
    prompt_embeds: Any = None


UNSUPPORTED = (
    *COMMON,
    UnsupportedField("prompt_embeds", absent, "send prompt instead"),
    UnsupportedField("suffix", absent, "text is completed at its end only"),
)
