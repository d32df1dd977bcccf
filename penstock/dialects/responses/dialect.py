"""``/v1/responses``: checks a request body and makes its plan and reply format."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from penstock.config.serve import ServeConfig
from penstock.dialects.responses.items import IMAGES_DROPPED, Conversation
from penstock.dialects.responses.output import OutputOptions
from penstock.dialects.responses.reply import ResponseFields, ResponsesReply
from penstock.dialects.responses.request_schema import (
    UNSUPPORTED,
    ContentPart,
    InputItem,
    ResponseRequest,
    ResponseTool,
    TextFormat,
)
from penstock.dialects.responses.tools import HOSTED, Tools, chat_tool_choice, parse_tools
from penstock.dialects.responses.truncation import truncated
from penstock.generation.dialect import NO_INFO, Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan, constrain
from penstock.generation.request import validation
from penstock.generation.request.body_decoder import check_parts
from penstock.generation.request.reasoning_effort import reasoning_variables
from penstock.generation.request.schemas import Message
from penstock.generation.request.structured_output import ANY_OBJECT, Constraint, SchemaPart, json_constraint
from penstock.generation.request.tool_choice import ToolChoice, message_format, parse_tool_choice
from penstock.http.errors import ApiError, refused, shown
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
INCLUDABLE = (
    ENCRYPTED,
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Those after the first two are of hosted tools, which make no items here."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits."""
NO_STORE = "this server keeps no responses (--response-store off)"


class Found(NamedTuple):
    """What the store has of a request's conversation."""

    chain: list[StoredResponse]
    """The responses that it continues, oldest first."""
    items: dict[str, InputItem]
    """Those it refers to, by id."""


class _References(msgspec.Struct):
    """The fields of a body that name stored things."""

    previous_response_id: str | None = None
    input: str | list[_Reference] | None = None


class _Reference(msgspec.Struct):
    type: str | None = None
    id: str | None = None


class _StoredOutput(msgspec.Struct):
    output: list[InputItem]


_decode_references = msgspec.json.Decoder(_References).decode
_decode_item = msgspec.json.Decoder(InputItem).decode
_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_decode_output = msgspec.json.Decoder(_StoredOutput).decode


class Responses(Dialect):
    """OpenAI's Responses API."""

    path = "/v1/responses"

    def __init__(
        self, config: ServeConfig, processor: InputProcessor, store: ResponseStore | None = None
    ) -> None:
        self._processor = processor
        self._store = store
        self._decoder = processor.decoder(ResponseRequest)
        self._unsupported = processor.unsupported(UNSUPPORTED)

    # -- what is stored

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[Found] | None:
        if b"previous_response_id" not in body and b"item_reference" not in body:
            return None
        check_parts(body, "The request body")
        try:
            wanted = _decode_references(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # plan says what is wrong with the body
        items = wanted.input if isinstance(wanted.input, list) else []
        ids = [each.id for each in items if each.type == "item_reference" and each.id is not None]
        if wanted.previous_response_id is None and not ids:
            return None
        if self._store is None:
            field = "input" if wanted.previous_response_id is None else "previous_response_id"
            raise ApiError(400, f"{field}: {NO_STORE}, send the whole conversation as input.", param=field)
        return self._find(self._store, wanted.previous_response_id, ids, info.tenant or "")

    async def _find(
        self, store: ResponseStore, previous_id: str | None, ids: list[str], tenant: str
    ) -> Found:
        chain = [] if previous_id is None else await store.chain(previous_id, tenant)
        items: dict[str, InputItem] = {}
        for id in ids:
            if id not in items:
                item = await store.item(id, tenant)
                if item is None:
                    raise ApiError(404, f"input: there is no item {shown(id)!r}.", param="input")
                items[id] = _decode_item(item)
        return Found(chain, items)

    # -- a request

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        processor = self._processor
        request = self._decoder.decode(body)
        self._unsupported.check(request)
        tools = parse_tools(request.tools)
        one_call = request.parallel_tool_calls is False
        choice = parse_tool_choice(
            tools.functions,
            chat_tool_choice(request.tool_choice, tools),
            one_call=one_call,
            constrained=request.structured_outputs is not None,
            known_format=processor.output_format.calls_tools,
            whitespace=processor.json_whitespace,
            syntax=processor.call_syntax,
            inputs={name: tool.input for name, tool in tools.called.items() if tool.input is not None},
        )
        processor.check_model(request.model)
        included = _included(request)
        logprobs = self._logprobs(request, included)
        max_tokens = request.max_output_tokens
        if max_tokens is not None:
            validation.check_max_tokens(max_tokens, processor.model_info.max_model_len, "max_output_tokens")
        conversation = self._conversation(request, found or Found([], {}))
        text = self._prompt(request, conversation.messages, choice)
        plan = processor.plan(request, info.request_id, [text], max_tokens=max_tokens, logprobs=logprobs)
        plan.include_usage, plan.continuous_usage = plan.stream, False
        plan.add_special_tokens = bool(request.add_special_tokens)
        plan.warning = _warning(choice, tools, conversation)
        _constrain(plan, request, choice, processor.json_whitespace)
        plan.format = message_format(
            choice,
            processor.output_format,
            text,
            constraint=plan.constraint,
            show_reasoning=request.include_reasoning is not False,
            one_call=request.parallel_tool_calls is False,
        )
        if plan.format is not None and processor.has_special_markers:
            plan.skip_special_tokens = False
        plan.dialect_fields = self._fields(request, plan, tools, included, info)
        plan.background = plan.dialect_fields.background
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ResponsesReply:
        return ResponsesReply(plan.dialect_fields, plan.model, self._store, self._processor.estimate_tokens)

    def _conversation(self, request: ResponseRequest, found: Found) -> Conversation:
        conversation = Conversation()
        if request.instructions:
            conversation.messages.append(Message(role="system", content=request.instructions))
        for stored in found.chain:
            conversation.add(_decode_items(stored.input), f"{stored.id}.input")
            conversation.add(_decode_output(stored.body).output, f"{stored.id}.output")
        if request.input is None:
            if not found.chain:
                raise ApiError(400, "input is missing: a text, or a list of items.", param="input")
        elif isinstance(request.input, str):
            conversation.add([_user_message(request.input)], "input")
        else:
            items = request.input
            if found.items:
                items = [
                    found.items.get(item.id or "", item) if item.type == "item_reference" else item
                    for item in items
                ]
            conversation.add(items, "input")
        if not conversation.messages:
            raise ApiError(400, "input must have at least one item.", param="input")
        return conversation

    def _prompt(self, request: ResponseRequest, messages: list[Message], choice: ToolChoice) -> str:
        processor = self._processor
        variables = _template_variables(request)

        def render(messages: list[Message]) -> str:
            return processor.render(
                processor.place_system_turns(messages, tools=bool(choice.tools)),
                add_generation_prompt=True,
                continue_final_message=False,
                tools=choice.tools,
                variables=variables,
            )

        truncation = request.truncation or "disabled"
        if truncation not in ("auto", "disabled"):
            raise refused("truncation must be auto or disabled.", "truncation", truncation)
        if truncation == "disabled":
            return render(messages)
        most = processor.model_info.max_model_len - (request.max_output_tokens or 1)
        return truncated(messages, render, partial(processor.count_tokens, most=most), most)

    def _logprobs(self, request: ResponseRequest, included: frozenset[str]) -> int:
        """Alternatives per token; -1: no logprobs."""
        alternatives = request.top_logprobs or 0
        if alternatives:
            processor = self._processor
            alternatives = validation.resolve_logprobs(
                alternatives, processor.max_logprobs, processor.model_info.vocab_size, "top_logprobs"
            )
        return alternatives if alternatives or LOGPROBS in included else -1

    # -- the response

    def _fields(
        self,
        request: ResponseRequest,
        plan: RequestPlan,
        tools: Tools,
        included: frozenset[str],
        info: RequestInfo,
    ) -> ResponseFields:
        stored = self._store is not None and request.store is not False
        background = bool(request.background)
        if background and not stored:
            reason = NO_STORE if self._store is None else "store must be true"
            raise ApiError(400, f"background: {reason}.", param="background")
        id = self._store.new_id() if self._store is not None else f"resp_{secrets.token_hex(18)}"
        reasoning = request.reasoning
        summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
        return ResponseFields(
            echo=_echo(request, plan, summary, stored=stored),
            options=OutputOptions(tools.called, summary is not None, ENCRYPTED in included),
            input=_own_items(request, id) if stored else [],
            id=id,
            tenant=info.tenant or "",
            previous_id=request.previous_response_id,
            stored=stored,
            background=background,
        )


def _user_message(text: str) -> InputItem:
    return InputItem(type="message", role="user", content=[ContentPart(type="input_text", text=text)])


def _own_items(request: ResponseRequest, id: str) -> list[InputItem]:
    """The items of the request for the store, each with an id."""
    given = request.input
    items = [_user_message(given)] if isinstance(given, str) else given or []
    prefix = f"msg_{id.removeprefix('resp_')}i"
    return [
        msgspec.structs.replace(
            item, type=item.type or "message", id=f"{prefix}{number:04x}" if item.id is None else item.id
        )
        for number, item in enumerate(items)
    ]


def _included(request: ResponseRequest) -> frozenset[str]:
    for number, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            field = f"include[{number}]"
            allowed = ", ".join(INCLUDABLE)
            raise ApiError(400, f"{field} must be one of {allowed}, got {shown(name)!r}.", param=field)
    return frozenset(request.include or ())


def _template_variables(request: ResponseRequest) -> dict[str, Any] | None:
    reasoning = request.reasoning
    effort = None if reasoning is None else reasoning.effort
    if reasoning is not None:
        summary = reasoning.summary or reasoning.generate_summary
        if summary not in (None, "auto", "concise", "detailed", "none"):
            raise refused(
                "reasoning.summary must be one of auto, concise, detailed.", "reasoning.summary", summary
            )
    return reasoning_variables(effort, "reasoning.effort", request.chat_template_kwargs)


def _warning(choice: ToolChoice, tools: Tools, conversation: Conversation) -> str | None:
    warnings = []
    if tools.dropped:
        warnings.append(
            f"tools: this server runs no hosted tools, the model does not see {', '.join(tools.dropped)}"
        )
    if choice.warning is not None:
        warnings.append(choice.warning)
    if conversation.dropped_images:
        warnings.append(IMAGES_DROPPED)
    return "; ".join(warnings) or None


def _constrain(plan: RequestPlan, request: ResponseRequest, choice: ToolChoice, whitespace: str) -> None:
    """Add the grammar of ``text.format`` or of the tool choice, which applies to calls alone."""
    format = None if request.text is None else request.text.format
    constraint = None if format is None else _format_constraint(format, whitespace)
    if constraint is not None:
        if plan.constraint is not None:
            fields = f"{plan.constraint.field} and {constraint.field}"
            raise ApiError(400, f"Only one constraint on the output is possible, got {fields}.", param=fields)
        constrain(plan, constraint)
    if choice.constraint is not None and not (choice.may_call and plan.constraint is not None):
        constrain(plan, choice.constraint)


def _format_constraint(format: TextFormat, whitespace: str) -> Constraint | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return json_constraint("text.format", ANY_OBJECT, whitespace)
    if format.type != "json_schema":
        raise ApiError(
            400,
            f"text.format.type must be text, json_object or json_schema, got {shown(format.type)!r}.",
            param="text.format.type",
        )
    if format.schema is None:
        raise ApiError(
            400, "text.format: the type 'json_schema' needs the field 'schema'.", param="text.format.schema"
        )
    part = SchemaPart((), "text.format.schema", loose=format.strict is False)
    return json_constraint(part.field, format.schema, whitespace, parts=(part,))


def _echo(
    request: ResponseRequest, plan: RequestPlan, summary: str | None, *, stored: bool
) -> dict[str, Any]:
    """The fields of the response object that repeat the request."""
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items()
    ):
        raise ApiError(
            400,
            f"metadata may have {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, with values of "
            f"{MAX_METADATA_VALUE}.",
            param="metadata",
        )
    reasoning, base = request.reasoning, plan.base
    return {
        "previous_response_id": request.previous_response_id,
        "instructions": request.instructions,
        "tools": [_tool(tool) for tool in _shown_tools(request.tools)],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": _text(request),
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": summary},
        "truncation": request.truncation or "disabled",
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": base.temperature,
        "top_p": base.top_p,
        "presence_penalty": base.presence_penalty,
        "frequency_penalty": base.frequency_penalty,
        "top_logprobs": request.top_logprobs or 0,
        "store": stored,
        "background": bool(request.background),
        "service_tier": "default",
        "metadata": metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }


def _text(request: ResponseRequest) -> dict[str, Any]:
    options = request.text
    format = None if options is None else options.format
    if format is None or format.type != "json_schema":
        shown_format: dict[str, Any] = {"type": "text" if format is None else format.type}
    else:
        shown_format = {
            "type": format.type,
            "name": format.name or "",
            "description": format.description,
            "schema": format.schema,
            "strict": format.strict is not False,
        }
    text: dict[str, Any] = {"format": shown_format}
    if options is not None and options.verbosity is not None:
        text["verbosity"] = options.verbosity
    return text


def _shown_tools(tools: list[ResponseTool] | None) -> list[ResponseTool]:
    """The tools that the model sees, as the request has them."""
    return [tool for tool in tools or () if tool.type not in HOSTED]


def _tool(tool: ResponseTool) -> Any:
    if tool.type != "function":
        return tool
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
