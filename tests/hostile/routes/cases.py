"""The cases: every field of every request type with every value, alone and together with others.

They are derived from the request types, so that a new field is attacked without a line here; a new route
needs a body in ``_BASE``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.api.routes.tokenize import DetokenizeRequest, TokenizeRequest
from penstock.config.serve import ServeConfig
from penstock.dialects.messages.dialect import MessagesTokenCounter
from penstock.dialects.messages.request_schema import CountTokensRequest
from penstock.dialects.registry import DESCRIPTIONS, make_pooling_dialects
from penstock.dialects.tokens.derender_schema import DerenderChatRequest, DerenderCompletionRequest
from tests.generation.pooling.planning import pooling_processor
from tests.hostile.routes.values import BIG_BYTES, fields_of, json_object, typed_values, values

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, TOKENS = "/v1/responses", "/v1/messages", "/inference/v1/generate"
GEMINI = "/v1beta/models/penstock-demo:generateContent"
GEMINI_EMBED = "/v1beta/models/penstock-demo:embedContent"
REQUESTS: dict[str, type[msgspec.Struct]] = {
    each.route.path.replace("{model}", "penstock-demo"): each.request for each in DESCRIPTIONS
} | {
    MessagesTokenCounter.path: CountTokensRequest,
    "/v1/chat/completions/derender": DerenderChatRequest,
    "/v1/completions/derender": DerenderCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""Request type by route."""
UNSUPPORTED: dict[str, frozenset[str]] = {
    each.route.path: frozenset(row.field for row in each.unsupported) for each in DESCRIPTIONS
}
"""Fields that are refused whatever the others are."""
POOLED = frozenset(
    each.path.replace("{model}", "penstock-demo")
    for each in make_pooling_dialects(ServeConfig(), pooling_processor())
)
"""Routes for vectors, scores and labels."""
_MESSAGES = [{"role": "user", "content": "Count."}]
_GENERATED = {"choices": [{"index": 0, "token_ids": [1, 2]}]}
_BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Count.", "max_tokens": 3},
    CHAT: {"messages": _MESSAGES, "max_tokens": 3},
    MESSAGES: {"messages": _MESSAGES, "max_tokens": 3},
    MessagesTokenCounter.path: {"messages": _MESSAGES},
    RESPONSES: {"input": "Count.", "max_output_tokens": 3},
    TOKENS: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
    "/v1/chat/completions/derender": {
        "generate_response": _GENERATED,
        "chat_request": {"messages": _MESSAGES},
    },
    "/v1/completions/derender": {"generate_responses": [_GENERATED], "completion_request": {"prompt": "a"}},
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}},
    "/api/chat": {"messages": _MESSAGES, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "Count.", "options": {"num_predict": 3}},
    GEMINI: {"contents": [{"parts": [{"text": "Count."}]}], "generationConfig": {"maxOutputTokens": 3}},
    GEMINI_EMBED: {"content": {"parts": [{"text": "Count."}]}},
    "/v1/embeddings": {"input": "Count."},
    "/pooling": {"input": "Count."},
    "/classify": {"input": "Count."},
    "/score": {"queries": "Count.", "documents": ["One.", "Two."]},
    "/api/embed": {"input": "Count."},
    "/rerank": {"query": "Count.", "documents": ["One.", "Two."]},
    "/v2/embed": {"texts": ["Count."]},
    "/embed": {"inputs": "Count."},
    "/tokenize": {"prompt": "Count."},
    "/detokenize": {"tokens": [1, 2]},
}
assert set(_BASE) == set(REQUESTS), f"_BASE lacks the smallest valid body of {set(REQUESTS) - set(_BASE)}"
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPANIONS: tuple[dict[str, Any], ...] = (
    {"n": 3},
    {"n": 64, "max_tokens": 1},
    {"stream": True},
    {"stream": True, "n": 4, "stream_options": {"include_usage": True}},
    {"echo": True, "return_token_ids": True},
    {"prompt_logprobs": 2},
    {"min_tokens": 3},
    {"min_tokens": 3, "allowed_token_ids": [0]},
    {"stop": ["a", "e"], "include_stop_str_in_output": True},
    {"allowed_token_ids": [5]},
    {"bad_words": ["a", "b"]},
    {"structured_outputs": {"json": _SCHEMA}},
    {"structured_outputs": {"json": {"$ref": "#"}}, "max_tokens": 1},
    {"structured_outputs": {"regex": "[0-9]+"}, "stream": True},
    {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [5]},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": "start: a\na: a"}, "max_tokens": 1, "stream": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}, "n": 2},
    {"logit_bias": {"5": 100}, "presence_penalty": 1.0, "repetition_penalty": 1.5},
    {"seed": 7, "temperature": 0.0},
    {"ignore_eos": True, "stop_token_ids": [5]},
)
_LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 3},
    COMPLETIONS: {"logprobs": 3},
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_OF_CHAT: tuple[dict[str, Any], ...] = (
    {"tools": [_TOOL], "tool_choice": "required"},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": True},
    {"continue_final_message": True, "add_generation_prompt": False},
)


class Case(NamedTuple):
    """One request, and the fields of which its error must name one."""

    path: str
    body: bytes
    fields: frozenset[str]

    @property
    def constrained(self) -> bool:
        """Whether it may ask for a grammar."""
        return any(word in self.body for word in (b"structured_outputs", b"response_format", b"tools"))

    @property
    def big(self) -> bool:
        return len(self.body) > BIG_BYTES

    def __str__(self) -> str:
        shown = self.body if len(self.body) < 400 else self.body[:200] + b" ... " + self.body[-100:]
        return f"{self.path} {shown!r} ({len(self.body)} bytes)"


def companions(path: str) -> Sequence[dict[str, Any]]:
    """Fields that a route's hostile ones are combined with."""
    if path not in _LOGPROBS:
        return ()
    return (*COMPANIONS, _LOGPROBS[path], *(_OF_CHAT if path == CHAT else ()))


def _case(path: str, name: str, value: bytes, others: dict[str, Any]) -> Case:
    fields = {key: json.dumps(each).encode() for key, each in (_BASE[path] | others).items()}
    if path == "/tokenize" and name == "messages":
        del fields["prompt"]
    return Case(path, json_object(fields | {name: value}), frozenset((name, *others)))


def singles(path: str) -> Iterator[Case]:
    """Every field with every value."""
    for field in fields_of(REQUESTS[path]):
        for value in values(field.type):
            yield _case(path, field.encode_name, value, {})


def pairs(path: str) -> Iterator[Case]:
    """Values of the fields' own types with each companion; big ones with those that multiply them only."""
    for field in fields_of(REQUESTS[path]):
        if field.encode_name in UNSUPPORTED.get(path, ()):
            continue
        for value in typed_values(field.type):
            for others in companions(path):
                if len(value) <= BIG_BYTES or "n" in others:
                    yield _case(path, field.encode_name, value, others)


def couples(path: str) -> Iterator[Case]:
    """Companions with each other."""
    for one in companions(path):
        for other in companions(path):
            name, *_ = one
            merged = one | other
            yield _case(path, name, json.dumps(merged[name]).encode(), merged)


def sample(cases: Sequence[Case], count: int, seed: int = 1) -> list[Case]:
    """``count`` of the cases, the same for the same ``seed``, in random order."""
    return random.Random(seed).sample(cases, min(count, len(cases)))
