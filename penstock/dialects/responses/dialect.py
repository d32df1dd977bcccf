"""``/v1/responses``: checks a request body and makes its plan and reply format."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable
from typing import Any, NamedTuple

import msgspec

from penstock.config.serve import ServeConfig
from penstock.dialects.responses.compaction import CompactedReply, CompactionReply, Summaries
from penstock.dialects.responses.echo import echoed_fields, summary_of
from penstock.dialects.responses.errors import error_body
from penstock.dialects.responses.included import ENCRYPTED, LOGPROBS, included_fields
from penstock.dialects.responses.output import OutputOptions
from penstock.dialects.responses.prompts import NO_STORE, Found, ResponsePrompt, ResponsePrompts
from penstock.dialects.responses.reply import Compacted, ResponseFields, ResponsesReply
from penstock.dialects.responses.request_schema import (
    UNSUPPORTED,
    ContentPart,
    InputItem,
    ResponseRequest,
    TextFormat,
)
from penstock.dialects.responses.text_format import text_format
from penstock.generation.compaction.compaction import Compaction, room
from penstock.generation.compaction.planned import Summary, checked_entries, checked_threshold
from penstock.generation.dialect import NO_INFO, CountedPrompt, Dialect, RequestInfo, TokenCounter
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan, constrain
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.request import validation
from penstock.generation.request.structured_output import ANY_OBJECT, Constraint, SchemaPart, json_constraint
from penstock.http.errors import ApiError, encode_json, refused
from penstock.store.response_store import ResponseStore

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit: items and their events repeat them."""


class CompactionFields(NamedTuple):
    """What the reply with a summary needs of its request."""

    response: ResponseFields
    summaries: Summaries


class Responses(Dialect):
    """OpenAI's Responses API."""

    path = "/v1/responses"
    sockets = True
    lifts_images = True
    stores_images = True

    def __init__(
        self,
        config: ServeConfig,
        processor: InputProcessor,
        store: ResponseStore | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self._processor = processor
        self._store = store
        self._prompts = ResponsePrompts(processor, store, compaction or Compaction())
        self._decoder = processor.decoder(ResponseRequest, messages="input")
        self._unsupported = processor.unsupported(UNSUPPORTED)

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[Found] | None:
        return self._prompts.look_up(body, info)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        processor = self._processor
        request = self._request(body, info.turn)
        if info.session is not None:
            _check_message(request)
        max_tokens = request.max_output_tokens
        if max_tokens is not None:
            validation.check_max_tokens(max_tokens, processor.model_info.max_model_len, "max_output_tokens")
        included_fields(request)
        prompt = self._prompts.prompt(request, found, info)
        if prompt.compacts:
            return self._summary_plan(request, prompt, info)
        plan = self._answer_plan(request, prompt, info)
        if request.context_management is not None:
            threshold = compact_threshold(request.context_management)
            if threshold is not None:
                plan.compaction = ThresholdCompaction(self, request, found, prompt, info, threshold)
        return plan

    def _answer_plan(
        self, request: ResponseRequest, prompt: ResponsePrompt, info: RequestInfo
    ) -> RequestPlan:
        processor, max_tokens = self._processor, request.max_output_tokens
        logprobs = self._logprobs(request, included_fields(request))
        if _prewarms(request):  # the engine makes a token, which is not sent
            max_tokens = 0
        plan = processor.plan(
            request, info.request_id, [prompt.text], max_tokens=max_tokens, logprobs=logprobs
        )
        plan.include_usage, plan.continuous_usage = plan.stream, False
        plan.add_special_tokens = bool(request.add_special_tokens)
        plan.warning = prompt.warning
        plan.images = prompt.conversation.unsupported.shown_images
        _constrain(plan, request, processor.json_whitespace)
        processor.set_output_format(
            plan,
            prompt.choice,
            prompt.text,
            show_reasoning=request.include_reasoning is not False,
            one_call=request.parallel_tool_calls is False,
        )
        plan.dialect_fields = self._fields(request, plan, prompt, info)
        return plan

    def _compacted_plan(
        self, request: ResponseRequest, prompt: ResponsePrompt, info: RequestInfo, summary: Summary
    ) -> RequestPlan:
        """The plan of a request whose conversation so far is replaced by a summary."""
        summaries = self._prompts.summaries(info)
        prompt.conversation.compact(summary.text, summaries.room)
        text = prompt.render(prompt.conversation.messages)
        plan = self._answer_plan(request, prompt._replace(text=text), info)
        plan.dialect_fields.compacted = Compacted(summaries.seal(summary.text), summary.usage)
        return plan

    def _request(self, body: bytes, turn: NextTurn | None = None) -> ResponseRequest:
        request = self._decoder.decode(body, turn)
        self._unsupported.check_fields(request)
        self._processor.require_model(request.model)
        return request

    def _summary_plan(
        self, request: ResponseRequest, prompt: ResponsePrompt, info: RequestInfo
    ) -> RequestPlan:
        """The plan of a summary: sampled as the request says, and not bound to what its answers must be."""
        processor = self._processor
        free = msgspec.structs.replace(
            request,
            structured_outputs=None,
            stop=None,
            min_tokens=None,
            truncate_prompt_tokens=None,
            generate=None,
            prompt_cache_options=None,
        )
        plan = processor.plan(free, info.request_id, [prompt.text], max_tokens=room(processor), logprobs=-1)
        plan.include_usage, plan.continuous_usage = plan.stream, False
        plan.add_special_tokens = bool(request.add_special_tokens)
        plan.warning = prompt.warning
        plan.images = prompt.conversation.unsupported.shown_images
        processor.set_output_format(plan, prompt.choice, prompt.text)
        constrain(plan, None)
        fields = self._fields(free, plan, prompt, info)
        plan.dialect_fields = CompactionFields(fields, self._prompts.summaries(info))
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ResponsesReply:
        fields = plan.dialect_fields
        if isinstance(fields, CompactionFields):
            return CompactionReply(fields.response, fields.summaries.seal, plan.model, self._store)
        return ResponsesReply(fields, plan.model, self._store)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)

    def _logprobs(self, request: ResponseRequest, included: frozenset[str]) -> int:
        """Alternatives per token; -1: no logprobs."""
        alternatives = request.top_logprobs or 0
        if alternatives > MAX_TOP_LOGPROBS:
            raise refused(f"top_logprobs must be at most {MAX_TOP_LOGPROBS}.", "top_logprobs", alternatives)
        if alternatives:
            processor = self._processor
            alternatives = validation.resolve_logprobs(
                alternatives, processor.max_logprobs, processor.model_info.vocab_size, "top_logprobs"
            )
        return alternatives if alternatives or LOGPROBS in included else -1

    def _fields(
        self,
        request: ResponseRequest,
        plan: RequestPlan,
        prompt: ResponsePrompt,
        info: RequestInfo,
    ) -> ResponseFields:
        included = included_fields(request)
        stored = self._store is not None and request.store is not False
        session = None if stored else info.session
        kept = stored or session is not None
        background = bool(request.background)
        if background and not stored:
            reason = NO_STORE if self._store is None else "store must be true"
            raise ApiError(400, f"background: {reason}.", param="background")
        id = self._store.new_id() if self._store is not None else f"resp_{secrets.token_hex(18)}"
        summary = summary_of(request)
        return ResponseFields(
            echo=encode_json(echoed_fields(request, plan.model, plan.base, stored=stored))[1:-1],
            options=OutputOptions(prompt.tools.called, summary is not None, ENCRYPTED in included),
            input=info.restored(encode_json(_with_ids(prompt.items, id))) if kept else b"",
            id=id,
            tenant=info.tenant or "",
            previous_id=request.previous_response_id,
            stored=stored,
            background=background,
            prewarms=_prewarms(request),
            session=session,
        )


class ThresholdCompaction(NamedTuple):
    """The compaction of a request whose prompt has more tokens than it allows."""

    dialect: Responses
    request: ResponseRequest
    found: Found | None
    prompt: ResponsePrompt
    info: RequestInfo
    threshold: int

    def summary_plan(self) -> RequestPlan:
        dialect = self.dialect
        prompt = dialect._prompts.prompt(self.request, self.found, self.info, compacts=True)
        return dialect._summary_plan(self.request, prompt, self.info)

    def resumed(self, summary: Summary) -> RequestPlan | None:
        if not summary.text:
            return None
        return self.dialect._compacted_plan(self.request, self.prompt, self.info, summary)


class Compact(Responses):
    """OpenAI's compaction of a conversation."""

    path = "/v1/responses/compact"
    sockets = False

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        request = self._request(body)
        once = msgspec.structs.replace(
            request, stream=None, store=False, background=None, stream_options=None
        )
        prompt = self._prompts.prompt(once, found, info, compacts=True)
        plan = self._summary_plan(once, prompt, info)
        shown = [_in_parts(item) for item in prompt.kept]
        kept = _with_ids(shown, plan.dialect_fields.response.id)
        plan.dialect_fields.response.input = info.restored(encode_json(kept))
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> CompactedReply:
        fields = plan.dialect_fields
        return CompactedReply(fields.response, fields.summaries.seal, plan.model, None)


class ResponsesTokenCounter(TokenCounter):
    """Counts the input tokens of a response."""

    path = "/v1/responses/input_tokens"

    def __init__(
        self,
        processor: InputProcessor,
        store: ResponseStore | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self._processor = processor
        self._prompts = ResponsePrompts(processor, store, compaction or Compaction())
        self._decoder = processor.decoder(ResponseRequest)

    def look_up(self, body: bytes, info: RequestInfo) -> Awaitable[Found] | None:
        return self._prompts.look_up(body, info)

    def prompt(self, body: bytes, info: RequestInfo, found: Any) -> CountedPrompt:
        request = self._decoder.decode(body)
        self._processor.check_model(request.model)
        prompt = self._prompts.prompt(request, found, info)
        images = prompt.conversation.unsupported.shown_images
        return CountedPrompt(prompt.text, bool(request.add_special_tokens), request.cache_salt, images)

    def reply(self, count: int) -> bytes:
        return b'{"object":"response.input_tokens","input_tokens":%d}' % count


def _check_message(request: ResponseRequest) -> None:
    """Check what is different over a WebSocket: the response is always streamed. Raises ApiError."""
    if request.background:
        reason = "not over a WebSocket; send POST /v1/responses"
        raise ApiError(400, f"background: {reason}.", param="background")
    request.stream = True


def compact_threshold(given: Any) -> int | None:
    """The least compact_threshold of the field context_management; None: it asks for none. Raises
    ApiError."""
    thresholds = []
    for number, entry in enumerate(checked_entries(given, "context_management")):
        field = f"context_management[{number}]"
        if entry["type"] != "compaction":
            raise refused(f"{field}.type must be compaction.", f"{field}.type", entry["type"])
        if entry.get("compact_threshold") is not None:
            thresholds.append(checked_threshold(entry["compact_threshold"], f"{field}.compact_threshold"))
    return min(thresholds, default=None)


def _prewarms(request: ResponseRequest) -> bool:
    """Whether the request is only to have its prompt in the engine's cache."""
    options = request.prompt_cache_options
    return request.generate is False or (options is not None and options.prewarm is True)


def _in_parts(item: InputItem) -> InputItem:
    """A message as the API returns it."""
    content = item.content
    if isinstance(content, str):
        content = [ContentPart(type="input_text", text=content)]
    return msgspec.structs.replace(item, content=content, status="completed")


def _with_ids(items: list[InputItem], response_id: str) -> list[InputItem]:
    """Items for the store, where each has an id."""
    prefix = f"msg_{response_id.removeprefix('resp_')}i"
    return [
        msgspec.structs.replace(
            item, type=item.type or "message", id=f"{prefix}{number:04x}" if item.id is None else item.id
        )
        for number, item in enumerate(items)
    ]


def _constrain(plan: RequestPlan, request: ResponseRequest, whitespace: str) -> None:
    """Add the grammar of ``text.format``."""
    format = text_format(request)
    constraint = None if format is None else _format_constraint(format, whitespace)
    if constraint is not None:
        if plan.constraint is not None:
            fields = f"{plan.constraint.field} and {constraint.field}"
            raise ApiError(400, f"Only one constraint on the output is possible, got {fields}.", param=fields)
        constrain(plan, constraint)


def _format_constraint(format: TextFormat, whitespace: str) -> Constraint:
    if format.schema is None:
        return json_constraint("text.format", ANY_OBJECT, whitespace)
    part = SchemaPart((), "text.format.schema", loose=format.strict is False)
    return json_constraint(part.field, format.schema, whitespace, parts=(part,))
