"""Options of speculative decoding."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group

GROUP = "Speculative decoding"


@option_group
class SpeculationOptions:
    """Options of speculative decoding in the torch engine."""

    speculative_method: Annotated[
        Literal["none", "ngram", "suffix", "draft"],
        option(
            "Source of drafts, several tokens that a step verifies at once; the output stays the same. "
            "ngram: what followed the same tokens earlier in the request; suffix: the same, and earlier "
            "outputs; draft: a smaller model (--draft-model).",
            GROUP,
        ),
    ] = "none"
    speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=32)] | Literal["auto"],
        option(
            "Maximum tokens of a draft. auto: chosen for each stream and step by acceptance and load; none "
            "where verification costs more than it gains.",
            GROUP,
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        option(
            "Model directory or Hugging Face model id of the draft model, with the model's vocabulary.",
            GROUP,
            metavar="MODEL",
        ),
    ] = None
