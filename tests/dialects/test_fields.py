"""Fields of requests and replies against vLLM's and OpenAI's own.

``tests/data/vllm/fields.json`` has the fields of vLLM's models by class. A field that vLLM sends as null is
in every whole reply, so that ``reply.choices[0].message.reasoning`` is no AttributeError in OpenAI's client.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.chat import completion_create_params as openai_chat

from penstock.api.routes.models import model_list
from penstock.api.routes.tokenize import DetokenizeRequest, TokenizeRequest
from penstock.dialects.chat.reply import message_fields
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.model_info import ModelInfo
from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.request.unknown_fields import unknown_fields
from penstock.http.errors import ApiError
from tests.generation.delivery import collected_reply
from tests.generation.planning import body, chat_body, planners

PLANNER = planners()
FIELDS: dict[str, list[str]] = json.loads(
    (Path(__file__).parent.parent / "data" / "vllm" / "fields.json").read_text()
)
ENTRYPOINTS = "vllm.entrypoints"
MODULES = {
    "chat_completion": f"{ENTRYPOINTS}.openai.chat_completion.protocol",
    "completion": f"{ENTRYPOINTS}.openai.completion.protocol",
    "engine": f"{ENTRYPOINTS}.serve.engine.protocol",
    "tokenize": f"{ENTRYPOINTS}.serve.tokenize.protocol",
}


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}], ids=["plain", "with ids"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_whole_reply_has_the_fields_of_vllms(chat: bool, fields: dict[str, Any]) -> None:
    name = "ChatCompletionResponse" if chat else "CompletionResponse"
    plan = PLANNER.chat(chat_body(**fields)) if chat else PLANNER.completion(body(**fields))
    reply = collected_reply(plan, [5, 6], chat=chat)
    assert list(reply) == FIELDS[name]
    [choice] = reply["choices"]
    assert list(choice) == FIELDS[f"{name}Choice"]
    assert list(reply["usage"]) == FIELDS["UsageInfo"]
    assert list(reply["usage"]["prompt_tokens_details"]) == FIELDS["PromptTokenUsageInfo"]
    assert (choice["token_ids"] is None) is not bool(fields)
    if chat:
        without_calls = [field for field in FIELDS["ChatMessage"] if field != "tool_calls"]
        assert list(choice["message"]) == without_calls  # vLLM's serializer drops an empty list


def test_a_message_with_calls_has_all_fields() -> None:
    message = {"role": "assistant"} | message_fields(Delta(calls=[CallDelta(0, "f", "{}", "call_1")]))
    assert list(message) == FIELDS["ChatMessage"]


def test_models_have_the_fields_of_vllms() -> None:
    listed = model_list(ModelInfo(names=("m",), max_model_len=64, vocab_size=8), "/model", (), {}, 0)
    [card] = listed["data"]
    assert list(listed) == FIELDS["ModelList"]
    assert list(card) == FIELDS["ModelCard"]
    assert list(card["permission"][0]) == FIELDS["ModelPermission"]


def test_errors_have_the_fields_of_vllms() -> None:
    error = json.loads(ApiError(400, "No.").body())
    assert list(error) == FIELDS["ErrorResponse"]
    assert list(error["error"]) == FIELDS["ErrorInfo"]


@pytest.mark.parametrize(
    ("type", "known"),
    [
        (ChatCompletionRequest, FIELDS["ChatCompletionRequest"]),
        (ChatCompletionRequest, list(get_type_hints(openai_chat.CompletionCreateParamsBase))),
        (CompletionRequest, FIELDS["CompletionRequest"]),
        (CompletionRequest, list(get_type_hints(openai_completion.CompletionCreateParamsBase))),
        (TokenizeRequest, FIELDS["TokenizeCompletionRequest"] + FIELDS["TokenizeChatRequest"]),
        (DetokenizeRequest, FIELDS["DetokenizeRequest"]),
    ],
)
def test_every_field_of_vllms_and_openais_requests_is_known(type: Any, known: list[str]) -> None:
    assert not set(known) - set(type.__struct_fields__)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("name", FIELDS)
def test_the_lists_are_those_of_the_installed_vllm(name: str) -> None:
    pytest.importorskip("vllm", reason="make test-vllm makes an environment with vLLM")
    [model] = [
        found
        for module in MODULES.values()
        if (found := getattr(import_module(module), name, None)) is not None and found.__module__ == module
    ]
    assert list(model.model_fields) == FIELDS[name]


def test_messages_that_helpers_of_the_openai_package_return_have_no_unknown_fields() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": "function", "index": 0, "function": function}
    message = ParsedChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    body = json.dumps({"messages": [message.model_dump()]}).encode()
    assert unknown_fields(body, ChatCompletionRequest) == []
