from __future__ import annotations

from typing import Any

import pytest

from penstock.api.routes.tokenize import UNSUPPORTED as TOKENIZE
from penstock.api.routes.tokenize import TokenizeRequest
from penstock.dialects.chat.request_schema import UNSUPPORTED as CHAT
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import UNSUPPORTED as COMPLETION
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.request.unsupported import UnsupportedField
from tests.generation.planning import body, chat_body, error_of, planners

PLANNER = planners()

NOT_SERVED: dict[str, Any] = {
    "audio": {"voice": "x"},
    "chat_template": "{{ 1 }}",
    "ebnf": "root ::= 'a'",
    "ec_transfer_params": {"a": 1},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "guided_choice": ["a"],
    "guided_grammar": "root ::= 'a'",
    "guided_json": {},
    "guided_regex": "",
    "json_schema": "{}",
    "kv_transfer_params": {"a": 1},
    "length_penalty": 0.5,
    "logprob_token_ids": [1],
    "media_io_kwargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "x"},
    "prompt_embeds": "AAAA",
    "regex": "a",
    "repetition_detection": {"a": 1},
    "return_prompt_text": True,
    "routed_experts_prompt_start": 1,
    "spaces_between_special_tokens": False,
    "suffix": "x",
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "web_search_options": {},
}
SERVED: dict[str, Any] = {
    "best_of": 1,
    "function_call": "none",
    "functions": [],
    "length_penalty": 1,
    "logprob_token_ids": [],
    "mm_payload": "tensors",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "explicit"},
    "return_mm_kwargs": True,
    "return_token_offsets": True,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "routed_experts_prompt_start": 0,
    "safety_identifier": "x",
    "service_tier": "flex",
    "store": True,
    "user": "me",
    "verbosity": "low",
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "suffix": "",
    "thinking_token_budget": -1,
    "use_beam_search": False,
}


def rows() -> list[Any]:
    return [
        pytest.param(row, id=row.field) for row in {row.field: row for row in (*CHAT, *COMPLETION)}.values()
    ]


@pytest.mark.parametrize("row", rows())
def test_each_row_is_refused_by_name(row: UnsupportedField) -> None:
    for table, plan, make in ((CHAT, PLANNER.chat, chat_body), (COMPLETION, PLANNER.completion, body)):
        if row in table:
            error = error_of(plan, make(**{row.field: NOT_SERVED[row.field]}))
            assert (error.status, error.type, error.param) == (400, "BadRequestError", row.field)
            assert error.message == f"{row.field} is not supported by this server: {row.allowed}."


@pytest.mark.parametrize("field", SERVED)
def test_values_that_ask_for_nothing_pass(field: str) -> None:
    if field in ChatCompletionRequest.__struct_fields__:
        PLANNER.chat(chat_body(**{field: SERVED[field]}))
    if field in CompletionRequest.__struct_fields__:
        PLANNER.completion(body(**{field: SERVED[field]}))


@pytest.mark.parametrize(
    ("table", "type"),
    [(CHAT, ChatCompletionRequest), (COMPLETION, CompletionRequest), (TOKENIZE, TokenizeRequest)],
)
def test_rows_are_fields(table: tuple[UnsupportedField, ...], type: Any) -> None:
    assert {row.field for row in table} <= set(type.__struct_fields__)
