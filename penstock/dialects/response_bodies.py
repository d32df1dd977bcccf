"""JSON bodies of replies that are not streamed, and of the small routes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from penstock.generation.collected import CollectedReply
from penstock.generation.events import SYSTEM_FINGERPRINT, encode_json
from penstock.generation.model_info import ModelInfo
from penstock.generation.replies import Choice, prompt_token_ids


def collected_body(reply: CollectedReply) -> bytes:
    """The body of a finished completion or chat completion."""
    shape = reply.shape
    make = _chat_choice if shape.chat else _completion_choice
    return_ids = reply.plan.return_token_ids
    body: dict[str, Any] = {
        "id": shape.id,
        "object": "chat.completion" if shape.chat else "text_completion",
        "created": shape.created,
        "model": shape.model,
        "choices": [
            make(index, choice, return_ids, shape.role) for index, choice in enumerate(reply.chosen())
        ],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": reply.usage(),
    }
    prompt = reply.choices[0].prompt
    if shape.chat and prompt.scores is not None:
        body["prompt_logprobs"] = prompt.scores.field()
    if shape.chat and return_ids:
        body["prompt_token_ids"] = prompt_token_ids(prompt)
    if reply.choices[0].kv_transfer_params is not None:
        body["kv_transfer_params"] = msgspec.Raw(reply.choices[0].kv_transfer_params)
    return encode_json(body)


def _completion_choice(index: int, choice: Choice, return_ids: bool, role: str) -> dict[str, Any]:
    text = choice.prompt.echo + choice.text.decode()
    made = {"index": index, "text": text} | _ending(choice, return_ids)
    if choice.prompt.scores is not None:
        made["prompt_logprobs"] = choice.prompt.scores.field()
    if return_ids:
        made["prompt_token_ids"] = prompt_token_ids(choice.prompt)
    return made


def _chat_choice(index: int, choice: Choice, return_ids: bool, role: str) -> dict[str, Any]:
    text = choice.prompt.echo + choice.text.decode()
    fields = {"content": text} if choice.parser is None else choice.parse(text).message()
    message = {"role": role, **fields, "refusal": None}
    return {"index": index, "message": message} | _ending(choice, return_ids)


def _ending(choice: Choice, return_ids: bool) -> dict[str, Any]:
    ending: dict[str, Any] = {
        "logprobs": None if choice.logprobs is None else choice.logprobs.take(),
        "finish_reason": choice.finish_reason.decode(),
        "stop_reason": choice.stop_reason,
    }
    if return_ids:
        ending["token_ids"] = choice.tokens
    return ending


def model_list(model_info: ModelInfo, root: str) -> dict[str, Any]:
    """The body of /v1/models; ``root`` is where the model is."""
    cards = [_model_card(name, root, None, model_info.max_model_len) for name in model_info.names]
    for adapter in model_info.adapters:
        parent = adapter.parent or model_info.names[0]
        cards.append(_model_card(adapter.name, adapter.path, parent, model_info.max_model_len))
    return {"object": "list", "data": cards}


def _model_card(name: str, root: str, parent: str | None, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "penstock",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }
