"""Requests of ``/v1/responses`` as chat completions. Nothing is stored: a response ends with its reply."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, NamedTuple

from penstock.dialects.responses.echo import echoed_fields, summary_of
from penstock.dialects.responses.included import ENCRYPTED, LOGPROBS, included_fields
from penstock.dialects.responses.items import Conversation
from penstock.dialects.responses.output import OutputOptions
from penstock.dialects.responses.reply import ResponseFields, ResponsesReply
from penstock.dialects.responses.request_schema import (
    UNSUPPORTED,
    ContentPart,
    InputItem,
    ResponseRequest,
)
from penstock.dialects.responses.text_format import text_format
from penstock.dialects.responses.tools import Tools, chat_tool_choice
from penstock.gateway.translation.chat_body import (
    chat_messages,
    effort_fields,
    same_fields,
    schema_format,
    tool_fields,
)
from penstock.gateway.translation.translated_request import TranslatedRequest
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.request.body_decoder import BodyDecoder
from penstock.generation.request.schemas import Message
from penstock.generation.request.unsupported import UnsupportedFieldCheck
from penstock.generation.request.unsupported_content import UnsupportedContent
from penstock.http.errors import ApiError, encode_json

_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "add_special_tokens",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
_decoder = BodyDecoder(ResponseRequest, strict=False)
_unsupported = UnsupportedFieldCheck(UNSUPPORTED)


class _Sampling(NamedTuple):
    """What the response says of sampling: the request's values, or OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def translate_response(raw: bytes, request_id: str) -> TranslatedRequest:
    """Raises ApiError for what no chat server can do."""
    request = _decoder.decode(raw)
    _unsupported.check_fields(request)
    included = included_fields(request)
    _refuse(request, included)
    tools = Tools(request.tools)
    conversation = Conversation(UnsupportedContent(sees_images=True))
    if request.instructions:
        conversation.append(Message(role="system", content=request.instructions))
    conversation.add(_items(request), "input")
    if not conversation.messages:
        raise ApiError(400, "input must have at least one item.", param="input")
    fields = same_fields(request, _SAME)
    fields["messages"] = chat_messages(conversation.messages, conversation.unsupported)
    fields |= tool_fields(
        tools.functions,
        chat_tool_choice(request.tool_choice, tools),
        one_call=request.parallel_tool_calls is False,
    )
    fields |= _format_fields(request)
    if request.max_output_tokens is not None:
        fields["max_tokens"] = request.max_output_tokens
    if request.reasoning is not None:
        fields |= effort_fields(request.reasoning.effort)
    output = MessageFormat(
        show_reasoning=request.include_reasoning is not False, custom=frozenset(tools.inputs())
    )
    warnings = filter(None, (tools.warning, conversation.unsupported.warning("input")))
    options = OutputOptions(tools.called, summary_of(request) is not None, ENCRYPTED in included)
    return TranslatedRequest(
        fields,
        partial(_reply, request.model or "", _echo(request), options),
        output,
        "; ".join(warnings) or None,
    )


def _refuse(request: ResponseRequest, included: frozenset[str]) -> None:
    """Raises ApiError for what needs a server that keeps responses, or that knows tokens."""
    items = request.input if isinstance(request.input, list) else ()
    refused = (
        (request.background, "background", "must be false or absent: no response outlives its request"),
        (request.previous_response_id, "previous_response_id", "must be absent: send the whole input"),
        (request.truncation == "auto", "truncation", "must be disabled or absent"),
        (request.top_logprobs, "top_logprobs", "must be 0 or absent"),
        (LOGPROBS in included, "include", f"must not have {LOGPROBS}"),
        (
            any(item.type == "item_reference" for item in items),
            "input",
            "must have the items themselves, no item_reference",
        ),
    )
    for value, field, allowed in refused:
        if value:
            message = f"{field} {allowed}. This model server speaks chat completions, and keeps no responses."
            raise ApiError(400, message, param=field)


def _items(request: ResponseRequest) -> list[InputItem]:
    given = request.input
    if given is None:
        raise ApiError(400, "input is missing: a text, or a list of items.", param="input")
    if isinstance(given, str):
        return [InputItem(role="user", content=[ContentPart(type="input_text", text=given)])]
    return given


def _format_fields(request: ResponseRequest) -> dict[str, Any]:
    """The field ``response_format``."""
    format = text_format(request)
    if format is None:
        return {}
    if format.schema is None:
        return {"response_format": {"type": "json_object"}}
    return schema_format(
        format.schema,
        name=format.name,
        description=format.description,
        strict=format.strict is not False,
    )


def _echo(request: ResponseRequest) -> bytes:
    """The fields of the response that repeat the request, as members of a JSON object."""
    sampling = _Sampling(**same_fields(request, _Sampling._fields))
    return encode_json(echoed_fields(request, request.model or "", sampling, stored=False))[1:-1]


def _reply(model: str, echo: bytes, options: OutputOptions) -> ResponsesReply:
    fields = ResponseFields(
        echo=echo,
        options=options,
        input=b"",
        id=f"resp_{secrets.token_hex(18)}",
        tenant="",
        previous_id=None,
        stored=False,
        background=False,
    )
    return ResponsesReply(fields, model, None)
