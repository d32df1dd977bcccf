"""The body of ``POST /v1/completions``, and which of its fields are not served."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.generation.request_schemas import GenerateRequest, PromptToken, about
from penstock.generation.unsupported import COMMON, UnsupportedField, absent

# Beyond the types, for the document at /openapi.json; errors for these have words of their own.
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
    logprobs: Annotated[int | None, about("Alternatives to report per token.")] = None
    suffix: str | None = None
    prompt_embeds: Any = None


UNSUPPORTED = (
    *COMMON,
    UnsupportedField("prompt_embeds", absent, "send prompt instead"),
    UnsupportedField("suffix", absent, "text is completed at its end only"),
)
