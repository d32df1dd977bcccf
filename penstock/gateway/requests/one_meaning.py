"""Refuses bodies in which a model server may read another value than the gateway has decided on.

The gateway reads fields by their exact names, the last of equal ones, and relays the body as it came. Other
parsers take the first of two (RapidJSON), do not care for case (Go, .NET), or let a name end at a NUL
(cJSON). So a key for one model could be used for another, and a budget for one token pay for a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from penstock.http.errors import ApiError, refused, shown
from penstock.http.repeated_names import repeated_name

OTHER_MODEL_FIELDS = (
    "lora_path",  # SGLang
    "lora",  # llama.cpp
    "adapters",  # MLX
    "adapter_id",  # LoRAX
    "models",  # OpenRouter
    "fallbacks",  # LiteLLM
)
"""Fields by which some servers take another model than the one of ``model``."""
DECIDING = frozenset(
    {
        *("model", *OTHER_MODEL_FIELDS),
        *("stream", "stream_options", "background", "priority"),
        *("prompt", "messages", "input", "instructions", "system", "tools", "metadata"),
        *("previous_response_id", "session_id", "prompt_cache_key"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "options", "n", "best_of"),
        *("contents", "systemInstruction", "generationConfig"),
        *("kv_transfer_params", "bootstrap_host", "echo", "prompt_logprobs", "logits_processors"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template", "chat_template_kwargs"),
    }
)
"""Fields on which routing, keys, budgets, prefills and metrics rest."""
DECIDING_OPTIONS = frozenset({"include_usage"})
"""Fields of ``stream_options`` on which metrics rest."""
MAX_REPEATED_NAMES = 64
MAX_REPEATED_CHARACTERS = 1024
"""Names of fields whose spelling is remembered, in one body."""
MAX_COLONS = 1 << 17
"""Colons outside the texts of a body: more fields than these would take longer than a turn of the event
loop."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_meaning(raw: bytes, texts: Iterable[bytes] = ()) -> None:
    """Refuse a JSON object of which servers may read something else. ``texts``: values that are known, and
    may be long. What is no object is left to the server. Raises ApiError."""
    texts = list(texts)
    rest = len(raw) - sum(map(len, texts))
    if rest > MAX_COLONS and raw.count(b":") - sum(text.count(b":") for text in texts) > MAX_COLONS:
        raise ApiError(400, f"The request has too many fields; {MAX_COLONS} are allowed.")
    try:
        fields = _fields(raw)
        _check(raw, fields, DECIDING, "")
        if (options := bytes(fields.get("stream_options", b""))).startswith(b"{"):
            _check(options, _fields(options), DECIDING_OPTIONS, "stream_options.")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return


def other_spelling(name: str, deciding: Iterable[str]) -> str | None:
    """The field of ``deciding`` for which some parsers take ``name``, though it is none of them."""
    folded = name.partition("\0")[0].casefold()
    return folded if folded != name and folded in deciding else None


def _misspelling(names: tuple[str, ...], deciding: frozenset[str]) -> tuple[str, str] | None:
    """The first of the names that some parsers take for a field of ``deciding``, and that field."""
    for name in names:
        if (meant := other_spelling(name, deciding)) is not None:
            return name, meant
    return None


_repeated_misspelling = lru_cache(maxsize=256)(_misspelling)
"""Programs send the same few fields again and again."""


def _check(raw: bytes, fields: dict[str, msgspec.Raw], deciding: frozenset[str], within: str) -> None:
    """Raises ApiError."""
    names = tuple(fields)
    few = len(names) <= MAX_REPEATED_NAMES and sum(map(len, names)) <= MAX_REPEATED_CHARACTERS
    if (found := (_repeated_misspelling if few else _misspelling)(names, deciding)) is not None:
        name, meant = found
        raise _refusal(within + name, f"some model servers take it for {within + meant!r}. Use that name.")
    if (twice := repeated_name(raw, fields)) is not None:
        raise _refusal(within + twice, "it is given twice, and servers differ in which one counts.")


def _refusal(name: str, why: str) -> ApiError:
    return refused(f"The field {shown(name)!r} is not allowed: {why}", shown(name))
