"""What requests may ask for elsewhere but not here: one table.

Each row is refused by name. A feature that gets built loses its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.http.errors import not_served


class Row(NamedTuple):
    """A field of requests that is known, and the values of it that are served."""

    field: str
    served: Callable[[Any], bool]
    allowed: str
    """The same in words, for the error."""


def _absent(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return bool(value == 1)


_ABSENT = "it must be absent"

COMMON = (
    Row("ec_transfer_params", _absent, _ABSENT),
    Row("kv_transfer_params", _absent, _ABSENT),
    Row("length_penalty", _one, "it must be 1 or absent"),
    Row("logprob_token_ids", _absent, _ABSENT),
    Row("mm_payload", lambda value: value == "none", "it must be none or absent"),
    Row("repetition_detection", _absent, _ABSENT),
    Row("return_mm_kwargs", _absent, "it must be false or absent"),
    Row("return_token_offsets", _absent, "it must be false or absent"),
    Row("return_tokens_as_token_ids", _absent, "it must be false or absent"),
    Row("routed_experts_prompt_start", _absent, "it must be 0 or absent"),
    Row("spaces_between_special_tokens", bool, "it must be true or absent"),
    Row("thinking_token_budget", lambda value: value == -1, "it must be -1 or absent"),
    Row("use_beam_search", _absent, "it must be false or absent"),
    Row("vllm_xargs", _absent, _ABSENT),
    Row("watermarking", _absent, "it must be false or absent"),
)
COMPLETION = (
    *COMMON,
    Row("prompt_embeds", _absent, "send prompt instead"),
    Row("suffix", _absent, "text is completed at its end only"),
)
CHAT = (
    *COMMON,
    Row("audio", _absent, _ABSENT),
    Row("chat_template", _absent, "the server's own is used (--chat-template)"),
    Row("function_call", lambda value: value == "none", "it must be none or absent"),
    Row("functions", _absent, _ABSENT),
    Row("media_io_kwargs", _absent, _ABSENT),
    Row("mm_processor_kwargs", _absent, _ABSENT),
    Row("modalities", lambda value: value == ["text"], '["text"] is served alone'),
    Row("moderation", _absent, _ABSENT),
    Row("prediction", _absent, _ABSENT),
    Row("prompt_cache_options", _absent, _ABSENT),
    Row("prompt_cache_retention", lambda value: value == "in_memory", "it must be in_memory or absent"),
    Row("return_prompt_text", _absent, "it must be false or absent"),
    Row("service_tier", lambda value: value in ("auto", "default"), "it must be auto, default or absent"),
    Row("store", _absent, "it must be false or absent"),
    Row("verbosity", lambda value: value == "medium", "it must be medium or absent"),
    Row("web_search_options", lambda value: False, _ABSENT),
)
TOKENIZE = tuple(
    row for row in CHAT if row.field in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
)


class UnsupportedFieldCheck:
    """Refuses what a table lists."""

    def __init__(self, rows: tuple[Row, ...], served: Collection[str] = ()) -> None:
        """``served``: fields of ``rows`` that the engine at hand does know."""
        self._rows = rows = tuple(row for row in rows if row.field not in served)
        # One call reads all the fields: a request with none of them pays half a microsecond.
        self._values = attrgetter(*(row.field for row in rows))
        self._nothing = (None,) * len(rows)

    def check(self, request: Any) -> None:
        """Raises ApiError for the first field with a value that is not served."""
        values = self._values(request)
        if values == self._nothing:
            return
        for row, value in zip(self._rows, values, strict=True):
            if value is not None and not row.served(value):
                raise not_served(row.field, row.allowed)
