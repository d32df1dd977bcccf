"""What the model reads of a request: its items and tools, and those of the responses that it continues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from penstock.dialects.responses.compaction import Summaries, kept_items
from penstock.dialects.responses.items import TRIGGER, Conversation
from penstock.dialects.responses.request_schema import ContentPart, InputItem, ResponseRequest
from penstock.dialects.responses.tools import Tools, chat_tool_choice
from penstock.generation.compaction.compaction import Compaction, kept_room
from penstock.generation.compaction.shortening import truncated
from penstock.generation.dialect import RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.request.body_decoder import check_parts
from penstock.generation.request.schemas import Message
from penstock.generation.request.thinking_budget import ThinkingPolicy
from penstock.generation.request.tool_choice import ToolChoice, parse_tool_choice
from penstock.generation.request.unsupported_content import UnsupportedContent
from penstock.http.errors import ApiError, refused, shown
from penstock.store.response_store import ResponseStore, missing_previous
from penstock.store.stored_response import StoredResponse

MAX_REFERRED_BYTES = 16 << 20
"""Items that a request refers to, each time that it does; as much as a body with the items may have."""
NO_STORE = "this server keeps no responses (--response-store off)"


class ResponsePrompt(NamedTuple):
    """The prompt of a request."""

    text: str
    conversation: Conversation
    render: Callable[[list[Message]], str]
    """The way from other messages to a prompt."""
    items: list[InputItem]
    """The request's own, references resolved."""
    tools: Tools
    choice: ToolChoice
    warning: str | None
    compacts: bool
    """Whether it asks for a summary."""
    kept: list[InputItem]
    """With that: the items that stay, those of earlier responses included."""


class Found(NamedTuple):
    """What the store has of a request's conversation."""

    chain: list[StoredResponse]
    """The responses that it continues, oldest first."""
    items: dict[str, InputItem]
    """Items that the input refers to, by id."""
    size: int
    """Bytes to read besides the body."""

    @property
    def conversation(self) -> str | None:
        """The id of its first response."""
        return self.chain[0].id if self.chain else None

    def unknown_bytes(self, turn: NextTurn) -> int:
        known = sum(len(each.input) + len(each.body) for each in self.chain if turn.has_stored(_key(each)))
        return self.size - known


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


NOTHING_FOUND = Found([], {}, 0)


class ResponsePrompts:
    """Makes the prompts of requests for one served model."""

    def __init__(
        self, processor: InputProcessor, store: ResponseStore | None, compaction: Compaction
    ) -> None:
        self._processor = processor
        self._store = store
        self.compaction = compaction

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
        if self._store is None and (info.session is None or ids):
            field = "input" if wanted.previous_response_id is None else "previous_response_id"
            raise ApiError(400, f"{field}: {NO_STORE}, send the whole conversation as input.", param=field)
        return self._find(wanted.previous_response_id, ids, info)

    async def _find(self, previous_id: str | None, ids: list[str], info: RequestInfo) -> Found:
        store, tenant, session = self._store, info.tenant or "", info.session
        chain: list[StoredResponse] = []
        if previous_id is not None and session is not None:
            chain = session.chain(previous_id)
        before = chain[0].previous_id if chain else previous_id
        if before is not None:
            if store is None:
                assert previous_id is not None, "before is, or precedes, it"
                raise missing_previous(previous_id, before)
            chain = await store.chain(before, tenant) + chain
        stored = await store.items(set(ids), tenant) if ids and store is not None else {}
        for id in ids:
            if id not in stored:
                raise ApiError(404, f"input: there is no item {shown(id)!r}.", param="input")
        referred = sum(len(stored[id]) for id in ids)
        if referred > MAX_REFERRED_BYTES:
            most = f"{MAX_REFERRED_BYTES >> 20} MiB"
            raise ApiError(400, f"input refers to items of more than {most} altogether.", param="input")
        items = {id: _decode_item(item) for id, item in stored.items()}
        return Found(chain, items, sum(len(each.input) + len(each.body) for each in chain) + referred)

    def summaries(self, info: RequestInfo) -> Summaries:
        """What seals and opens the compaction items of a request."""
        room = kept_room(self._processor)
        return Summaries(self.compaction.seals, info.tenant or "", room)

    def prompt(
        self, request: ResponseRequest, found: Found | None, info: RequestInfo, *, compacts: bool = False
    ) -> ResponsePrompt:
        """``found``: what look_up gave; ``compacts``: for a summary, whether the input asks for it or not.
        Raises ApiError."""
        processor = self._processor
        found = found or NOTHING_FOUND
        items = _own_items(request, found)
        if items and items[-1].type == TRIGGER:
            items, compacts = items[:-1], True
        tools = Tools(request.tools)
        choice = parse_tool_choice(
            tools.functions,
            None if compacts else chat_tool_choice(request.tool_choice, tools),
            one_call=request.parallel_tool_calls is False,
            constrained=request.structured_outputs is not None,
            known_format=processor.output_format.calls_tools,
            whitespace=processor.json_whitespace,
            syntax=processor.call_syntax,
            inputs=tools.inputs(),
        )
        choice = tools.named_here(choice)
        summaries = self.summaries(info)
        conversation = _conversation(processor, request, items, found, summaries, info.turn)
        kept: list[InputItem] = []
        seen = conversation.unsupported
        render = self._render(request, choice, seen, None)
        if compacts:
            kept = kept_items([*_stored_items(found), *items], summaries.room)
            text = self.compaction.summary_prompt(processor, conversation.messages, render)
        else:
            of_turn = self._render(request, choice, seen, info.turn)
            text = self._rendered(request, conversation.messages, of_turn)
        warning = _warning(choice, tools, conversation)
        return ResponsePrompt(text, conversation, render, items, tools, choice, warning, compacts, kept)

    def _render(
        self, request: ResponseRequest, choice: ToolChoice, seen: UnsupportedContent, turn: NextTurn | None
    ) -> Callable[[list[Message]], str]:
        """The way from messages to the prompt's text."""
        processor = self._processor
        variables = _template_variables(request, processor.thinking)

        def render(messages: list[Message]) -> str:
            seen.note_shown(messages)
            try:
                return processor.render(
                    messages,
                    add_generation_prompt=True,
                    continue_final_message=False,
                    tools=choice.tools,
                    variables=variables,
                    stable=True,
                    turn=turn,
                )
            except ApiError as error:
                if error.param == "messages":  # what the chat template refuses
                    error.param = "input"
                raise

        return render

    def _rendered(
        self, request: ResponseRequest, messages: list[Message], render: Callable[[list[Message]], str]
    ) -> str:
        processor = self._processor
        truncation = request.truncation or "disabled"
        if truncation not in ("auto", "disabled"):
            raise refused("truncation must be auto or disabled.", "truncation", truncation)
        if truncation == "disabled":
            return render(messages)
        most = processor.model_info.max_model_len - (request.max_output_tokens or 1)
        return truncated(messages, render, partial(processor.count_tokens, most=most), most)


def _user_message(text: str) -> InputItem:
    return InputItem(type="message", role="user", content=[ContentPart(type="input_text", text=text)])


def _own_items(request: ResponseRequest, found: Found) -> list[InputItem]:
    given = request.input
    if given is None:
        if not found.chain:
            raise ApiError(400, "input is missing: a text, or a list of items.", param="input")
        return []
    if isinstance(given, str):
        return [_user_message(given)]
    if not found.items:
        return given
    return [found.items.get(item.id or "", item) if item.type == "item_reference" else item for item in given]


def _decoded(stored: StoredResponse) -> tuple[list[InputItem], list[InputItem]]:
    """The items of a stored response, and of its output."""
    return _decode_items(stored.input), _decode_output(stored.body).output


def _key(stored: StoredResponse) -> tuple[str, int, int]:
    return stored.id, len(stored.input), len(stored.body)


def _stored_items(found: Found) -> list[InputItem]:
    return [
        item
        for stored in found.chain
        for item in (*_decode_items(stored.input), *_decode_output(stored.body).output)
    ]


def _conversation(
    processor: InputProcessor,
    request: ResponseRequest,
    items: list[InputItem],
    found: Found,
    summaries: Summaries,
    turn: NextTurn | None,
) -> Conversation:
    conversation = Conversation(processor.unsupported_content(), summaries=summaries)
    if request.instructions:
        conversation.append(Message(role="system", content=request.instructions))
    for stored in found.chain:
        read = partial(_decoded, stored)
        given, output = read() if turn is None else turn.stored(_key(stored), read)
        conversation.add(given, f"{stored.id}.input")
        conversation.add(output, f"{stored.id}.output")
    conversation.add(items, "input")
    if not conversation.messages:
        raise ApiError(400, "input must have at least one item.", param="input")
    return conversation


def _template_variables(request: ResponseRequest, budgets: ThinkingPolicy) -> dict[str, Any] | None:
    """Sets the budget of its effort, if it has none. Raises ApiError."""
    reasoning = request.reasoning
    effort = None if reasoning is None else reasoning.effort
    if reasoning is not None:
        summary = reasoning.summary or reasoning.generate_summary
        if summary not in (None, "auto", "concise", "detailed", "none"):
            raise refused(
                "reasoning.summary must be one of auto, concise, detailed.", "reasoning.summary", summary
            )
    variables, budget = budgets.effort(effort, "reasoning.effort", request.chat_template_kwargs)
    if request.thinking_token_budget is None:
        request.thinking_token_budget = budget
    return variables


def _warning(choice: ToolChoice, tools: Tools, conversation: Conversation) -> str | None:
    warnings = (tools.warning, choice.warning, conversation.unsupported.warning("input"))
    return "; ".join(filter(None, warnings)) or None
