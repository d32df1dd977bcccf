"""The request that has an endpoint compute a prompt, and its answer: where another one finds the KV cache.

The fields are those of vLLM's connectors, as of 0.32: with ``do_remote_decode`` an endpoint keeps the blocks
of a request that ended by its length, and its reply has the ``kv_transfer_params`` by which another one gets
them. What they hold is the connector's affair; they are handed on as they are.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.gateway.responses.error_kind import error_kind
from penstock.gateway.responses.event_reader import read_reply

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = frozenset({CHAT, COMPLETIONS})
"""APIs whose replies have kv_transfer_params."""
_ASKED = msgspec.Raw(
    msgspec.json.encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)
_NEEDS_PROMPT = ("echo", "prompt_logprobs", "logits_processors", "kv_transfer_params")
"""Fields of requests whose prompt the endpoint that answers computes; the last is another router's."""
_NOTHING = frozenset({b"null", b"false"})
_ONE = frozenset({b"1", b"null"})
_OF_OUTPUT = ("stream_options", "min_tokens")
"""Fields of the output alone, which contradict an output of one token, or no stream."""
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[\]]').match
"""Matches a list of texts, or of lists of token ids, or of nothing."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Reply(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None
    choices: list[_Choice] | None = None


class _Params(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_FAILED = ("error", "abort")
"""Reasons for which a choice has ended without a result."""


def prefill_body(path: str, raw: bytes) -> bytes | None:
    """The body of the request that only prefills; None: another endpoint cannot use what it computes."""
    if path not in PATHS:
        return None
    try:
        fields = _decode_fields(raw)
        prompts = _count_prompts(fields.get("prompt", msgspec.Raw(b"null")))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if prompts != 1:
        return None  # the reply has the parameters of one
    if any(bytes(fields.get(name, b"null")) not in _NOTHING for name in _NEEDS_PROMPT):
        return None
    if any(bytes(fields.get(name, b"1")) not in _ONE for name in ("n", "best_of")):
        return None  # the blocks can be fetched once
    for name in _OF_OUTPUT:
        fields.pop(name, None)
    fields["max_tokens"] = msgspec.Raw(b"1")
    if path == CHAT:
        fields["max_completion_tokens"] = msgspec.Raw(b"1")
    fields["stream"] = msgspec.Raw(b"false")
    fields["kv_transfer_params"] = _ASKED
    return _encode(fields)


def _count_prompts(prompt: msgspec.Raw) -> int:
    """Prompts of a request for completions. Raises msgspec.MsgspecError."""
    return len(_decode_list(prompt)) if _LIST_OF_PROMPTS(prompt) else 1


def transfer_params(reply: bytes) -> bytes | None:
    """The ``kv_transfer_params`` of a reply, JSON; None: there are none, so the blocks are in a store that
    endpoints share, if anywhere. Raises ValueError for what is no reply, or an error."""
    parsed = read_reply(reply)
    if parsed.error is not None:
        raise ValueError(f"an error {error_kind(parsed.error)}".rstrip())
    try:
        said = _decode_reply(reply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if said.choices is None and not said.kv_transfer_params:
        raise ValueError("a reply without choices")
    if any(choice.finish_reason in _FAILED for choice in said.choices or ()):
        raise ValueError("a choice that ended with an error")
    if not said.kv_transfer_params:
        return None
    return bytes(_decode_params(reply).kv_transfer_params)
