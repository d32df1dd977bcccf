"""``/v1/messages``: Anthropic's API. Checks a request body and makes its plan and reply format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.config.serve import ServeConfig
from penstock.dialects.messages.block_texts import BlockTexts
from penstock.dialects.messages.cache_control import keep_seconds
from penstock.dialects.messages.compaction import (
    BLOCK,
    AskedCompaction,
    CompactedMessage,
    SignedSummaries,
    asked_compaction,
)
from penstock.dialects.messages.context_edits import unapplied_edits
from penstock.dialects.messages.conversation import convert_messages
from penstock.dialects.messages.errors import error_body, is_anthropic
from penstock.dialects.messages.output_schema import output_schema
from penstock.dialects.messages.reply import MessageFields, MessagesReply
from penstock.dialects.messages.request_schema import (
    UNSUPPORTED,
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
)
from penstock.dialects.messages.thinking import Thinking, parse_thinking
from penstock.dialects.messages.tools import convert_choice, convert_tools
from penstock.generation.compaction.compaction import Compaction, room
from penstock.generation.compaction.planned import Summary
from penstock.generation.dialect import NO_INFO, CountedPrompt, Dialect, RequestInfo, TokenCounter
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import ASSISTANT, RequestPlan, constrain
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.request import validation
from penstock.generation.request.schemas import GenerateRequest, Message
from penstock.generation.request.structured_output import Constraint, SchemaPart, json_constraint
from penstock.generation.request.tool_choice import ToolChoice, parse_tool_choice
from penstock.generation.request.unsupported_content import UnsupportedContent
from penstock.http.errors import ApiError

_PARAMETERS, _SCHEMA = ".function.parameters", ".input_schema"
"""Names of a tool's schema: in chat completions, and here."""


class _Conversation(NamedTuple):
    """The prompt of a request, and what its output may be."""

    text: str
    choice: ToolChoice
    one_call: bool
    thinking: Thinking
    warning: str | None
    continued: Message | None
    """The message that the output continues."""
    messages: list[Message]
    content: UnsupportedContent
    """Its pictures."""


class _ReplyFields(NamedTuple):
    omit_thinking: bool
    compacted: CompactedMessage | None = None


class Messages(Dialect):
    """Anthropic's Messages."""

    path = "/v1/messages"
    lifts_images = True
    recognizes_clients = True

    def __init__(
        self, config: ServeConfig, processor: InputProcessor, compaction: Compaction | None = None
    ) -> None:
        self._processor = processor
        self.compaction = compaction or Compaction()
        self._decoder = processor.decoder(MessagesRequest, messages="messages")
        self._unsupported = processor.unsupported(UNSUPPORTED)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        processor = self._processor
        request = self._decoder.decode(body, info.turn)
        self._unsupported.check_fields(request)
        processor.require_model(request.model)
        asked = asked_compaction(request)
        summaries = SignedSummaries(self.compaction.seals, info.tenant or "")
        conversation = _conversation(processor, request, summaries, info.turn)
        plan = self.answer_plan(request, conversation, info)
        if b"cache_control" in body:
            plan.keep_s = keep_seconds(request)
        if asked is not None:
            plan.compaction = MessagesCompaction(self, request, conversation, summaries, info, asked)
        return plan

    def answer_plan(
        self, request: MessagesRequest, conversation: _Conversation, info: RequestInfo
    ) -> RequestPlan:
        """The plan of the message itself. Raises ApiError."""
        processor = self._processor
        plan = processor.plan(
            _sampling_fields(request, conversation.thinking.budget),
            info.request_id,
            [conversation.text],
            max_tokens=request.max_tokens,
            logprobs=-1,
        )
        plan.max_model_len = processor.max_total  # whatever max_tokens says: all requests have it
        plan.include_usage, plan.continuous_usage = True, False
        plan.images = conversation.content.shown_images
        plan.add_special_tokens = False
        if plan.session is None and request.metadata is not None:
            plan.session = request.metadata.user_id
        plan.dialect_fields = _ReplyFields(conversation.thinking.omitted)
        choice = conversation.choice
        plan.warning = conversation.warning
        constraint = _output_constraint(request, processor.json_whitespace)
        if constraint is not None:
            constrain(plan, constraint)
        processor.set_output_format(
            plan,
            choice,
            conversation.text,
            continued=conversation.continued,
            show_reasoning=conversation.thinking.shown,
            one_call=conversation.one_call,
        )
        return plan

    def summary_plan(
        self,
        request: MessagesRequest,
        conversation: _Conversation,
        info: RequestInfo,
        asked: AskedCompaction,
    ) -> RequestPlan:
        """The plan of a summary: sampled as the request says, and not bound to what its answers must be."""
        processor, thinking = self._processor, conversation.thinking
        free = msgspec.structs.replace(request, tool_choice=None, stop_sequences=None, stream=None)
        choice = _choice(processor, free)

        def render(messages: list[Message]) -> str:
            conversation.content.note_shown(messages)
            return processor.render(
                messages,
                add_generation_prompt=True,
                continue_final_message=False,
                tools=choice.tools,
                variables=thinking.variables,
                stable=True,
            )

        prompt = self.compaction.prompt
        if asked.instructions is not None:
            prompt = asked.instructions if asked.replaces else f"{prompt}\n\n{asked.instructions}"
        text = self.compaction.summary_prompt(processor, conversation.messages, render, prompt)
        fields = _sampling_fields(free, thinking.budget)
        plan = processor.plan(fields, info.request_id, [text], max_tokens=room(processor), logprobs=-1)
        plan.add_special_tokens = False
        plan.images = conversation.content.shown_images
        processor.set_output_format(plan, choice, text)
        constrain(plan, None)
        return plan

    def compacted_plan(
        self,
        request: MessagesRequest,
        summary: Summary,
        summaries: SignedSummaries,
        info: RequestInfo,
        *,
        pauses: bool,
    ) -> RequestPlan:
        """The plan of a request whose conversation is replaced by a summary. One that ``pauses`` only has its
        prompt in the engine's cache, for the request that goes on."""
        compacted = CompactedMessage(None, "", summary.usage, pauses)
        if summary.text:
            signature = summaries.sign(summary.text)
            compacted = compacted._replace(content=summary.text, signature=signature)
            block = ContentBlock(type=BLOCK, content=summary.text, signature=signature)
            request = msgspec.structs.replace(
                request, messages=[InputMessage(role=ASSISTANT, content=[block])]
            )
        if pauses:
            request = msgspec.structs.replace(request, max_tokens=0)
        conversation = _conversation(self._processor, request, summaries)
        plan = self.answer_plan(request, conversation, info)
        plan.dialect_fields = plan.dialect_fields._replace(compacted=compacted)
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> MessagesReply:
        fields = MessageFields(
            id=f"msg_{plan.request_id or request_id}",
            model=plan.model,
            request_id=request_id,
            omit_thinking=plan.dialect_fields.omit_thinking,
            context=plan.max_model_len,
            max_tokens=0 if plan.max_tokens == 0 else plan.base.max_tokens,
            compacted=plan.dialect_fields.compacted,
        )
        return MessagesReply(fields)

    def recognizes(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        return is_anthropic(path, headers)

    def reply_headers(self, request_id: str) -> Sequence[tuple[bytes, bytes]]:
        return [(b"request-id", request_id.encode("latin-1"))]

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error, request_id)


class MessagesCompaction(NamedTuple):
    """The compaction of a request that asks for it."""

    dialect: Messages
    request: MessagesRequest
    conversation: _Conversation
    summaries: SignedSummaries
    info: RequestInfo
    asked: AskedCompaction

    @property
    def threshold(self) -> int:
        return self.asked.threshold

    def summary_plan(self) -> RequestPlan:
        return self.dialect.summary_plan(self.request, self.conversation, self.info, self.asked)

    def resumed(self, summary: Summary) -> RequestPlan | None:
        asked = self.asked
        if not summary.text and not asked.replaces:
            return None
        return self.dialect.compacted_plan(
            self.request, summary, self.summaries, self.info, pauses=asked.pauses
        )


class MessagesTokenCounter(TokenCounter):
    """Counts the input tokens of a message."""

    path = "/v1/messages/count_tokens"

    def __init__(self, processor: InputProcessor, compaction: Compaction | None = None) -> None:
        self._processor = processor
        self._seals = (compaction or Compaction()).seals
        self._decoder = processor.decoder(CountTokensRequest)

    def prompt(self, body: bytes, info: RequestInfo, found: Any) -> CountedPrompt:
        request = self._decoder.decode(body)
        self._processor.require_model(request.model)
        summaries = SignedSummaries(self._seals, info.tenant or "")
        conversation = _conversation(self._processor, request, summaries)
        images = conversation.content.shown_images
        return CountedPrompt(conversation.text, add_special_tokens=False, images=images)

    def reply(self, count: int) -> bytes:
        return b'{"input_tokens":%d}' % count

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error, request_id)


def _sampling_fields(request: MessagesRequest, budget: int | None) -> GenerateRequest:
    validation.stop_strings(request.stop_sequences, "stop_sequences")
    return GenerateRequest(
        model=request.model,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        stop=request.stop_sequences,
        seed=request.seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        thinking_token_budget=budget,
        session_id=request.session_id,
        kv_hints=request.kv_hints,
    )


def _choice(processor: InputProcessor, request: CountTokensRequest) -> ToolChoice:
    """Raises ApiError."""
    choice = parse_tool_choice(
        convert_tools(request.tools),
        convert_choice(request.tool_choice),
        one_call=_one_call(request),
        constrained=False,
        known_format=processor.output_format.calls_tools,
        whitespace=processor.json_whitespace,
        syntax=processor.call_syntax,
    )
    return choice._replace(constraint=_named_here(choice.constraint))


def _one_call(request: CountTokensRequest) -> bool:
    return request.tool_choice is not None and bool(request.tool_choice.disable_parallel_tool_use)


def _conversation(
    processor: InputProcessor,
    request: CountTokensRequest,
    summaries: SignedSummaries,
    turn: NextTurn | None = None,
) -> _Conversation:
    """Raises ApiError."""
    choice = _choice(processor, request)
    thinking = parse_thinking(request, processor.thinking)
    texts = BlockTexts(processor.unsupported_content())
    messages = convert_messages(request, texts, summaries)
    continued = messages[-1].role == ASSISTANT and not messages[-1].tool_calls
    text = processor.render(
        messages,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        tools=choice.tools,
        variables=thinking.variables,
        stable=True,
        turn=turn,
    )
    texts.unsupported.note_shown(messages)
    unseen, edits = texts.unsupported.warning("messages"), unapplied_edits(request.context_management)
    warnings = [choice.warning, thinking.warning, unseen, edits]
    warning = "; ".join(filter(None, warnings)) or None
    last = messages[-1] if continued else None
    one_call = _one_call(request)
    return _Conversation(text, choice, one_call, thinking, warning, last, messages, texts.unsupported)


def _named_here(constraint: Constraint | None) -> Constraint | None:
    """The constraint of a tool choice, with the names that fields have in this API."""
    if constraint is None:
        return None
    parts = [each._replace(field=each.field.replace(_PARAMETERS, _SCHEMA)) for each in constraint.parts]
    return constraint._replace(field=constraint.field.replace(_PARAMETERS, _SCHEMA), parts=tuple(parts))


def _output_constraint(request: CountTokensRequest, whitespace: str) -> Constraint | None:
    """Raises ApiError."""
    wanted = output_schema(request)
    if wanted is None:
        return None
    part = SchemaPart((), wanted.field)
    return json_constraint(part.field, wanted.schema, whitespace, parts=(part,))
