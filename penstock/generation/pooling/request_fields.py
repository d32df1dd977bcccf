"""The fields that vLLM's APIs for vectors, scores and labels share, and the plan that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from penstock.generation.dialect import RequestInfo
from penstock.generation.input_processor import opens_turn
from penstock.generation.pooling.plan import PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.prompt.prompts import parse_prompts
from penstock.generation.request.schemas import Int64, JsonObject, Message, Part, PromptToken, about
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent
from penstock.generation.request.unsupported_content import UNSUPPORTED_PARTS
from penstock.generation.request.validation import MAX_STREAMS
from penstock.http.errors import ApiError, refused, shown
from penstock.http.request import MAX_REQUEST_ID
from penstock.wire.pooling import PoolingTask

MAX_INPUTS = MAX_STREAMS
"""Inputs of one request, twice as many as OpenAI takes; their bytes are bounded by --max-request-bytes."""
_UNUSED_END_USER = about("Not used: your end user.")
# For /openapi.json only; other code checks it and has its own error messages.
_NOT_EMPTY = {"minItems": 1}

RequestId = Annotated[
    Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)] | None,
    about("Part of the reply's id; the header X-Request-Id takes precedence."),
]


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What each of vLLM's requests may have."""

    model: Annotated[str | None, about("A served model; default: the first one.")] = None
    user: Annotated[str | None, _UNUSED_END_USER] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        about("Cut longer inputs to this many tokens; -1: to the model's; absent: they are an error."),
    ] = None
    truncation_side: Annotated[
        str | None, about("Side on which truncation drops tokens: right (default) or left.")
    ] = None
    use_activation: Annotated[
        bool | None,
        about("false: vectors without normalization, and numbers of labels that are no probabilities."),
    ] = None
    priority: Annotated[Int64 | None, about("Scheduling priority; lower values run earlier; default 0.")] = (
        None
    )
    request_id: RequestId = None
    cache_salt: Annotated[str | None, about("Not used: no cache is shared.")] = None
    padding: str | None = None
    mm_processor_kwargs: JsonObject | None = None


class TextsRequest(PoolingRequest, kw_only=True):
    """What requests for inputs that are no pairs may have."""

    input: Annotated[
        str | list[str | PromptToken | list[PromptToken]] | None,
        about(
            "A text, a list of texts, a list of token ids, or a list of lists of token ids.",
            extra_json_schema=_NOT_EMPTY,
        ),
    ] = None
    messages: Annotated[
        list[Message | list[Message]] | None,
        about("In place of input: a conversation, or a list of them, for the model's chat template."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about("Whether the tokenizer adds its special tokens; default true, of conversations false."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, about("Whether a conversation ends with the start of the assistant's turn.")
    ] = None
    continue_final_message: Annotated[
        bool | None, about("Whether the last message of a conversation is left open.")
    ] = None
    chat_template_kwargs: Annotated[JsonObject | None, about("Variables for the chat template.")] = None
    prompt_name: Annotated[
        str | None, about("Name of the prompt, of those in the model's files, that precedes each input.")
    ] = None
    chat_template: str | None = None
    media_io_kwargs: JsonObject | None = None


class VectorsRequest(TextsRequest, kw_only=True):
    """What requests for vectors may have."""

    encoding_format: Annotated[
        str | None,
        about(
            "float (default): JSON numbers; base64; bytes: no JSON, but the vectors one after the other; "
            "bytes_only: the same without the header metadata."
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        about("How many values of each vector are wanted; it is normalized after the others are cut."),
    ] = None
    embed_dtype: Annotated[str | None, about("Type of the values, but of float; default float32.")] = None
    endianness: Annotated[
        str | None, about("Byte order of the values, but of float: native or little (default), or big.")
    ] = None
    normalize: Annotated[bool | None, about("An earlier name of use_activation.")] = None


UNSUPPORTED_POOLING = (
    UnsupportedField("mm_processor_kwargs", absent, MUST_BE_ABSENT),
    UnsupportedField("padding", lambda value: value == "do_not_pad", "it must be do_not_pad or absent"),
)
UNSUPPORTED_TEXTS = (
    *UNSUPPORTED_POOLING,
    UnsupportedField("chat_template", absent, "the server's own is used (--chat-template)"),
    UnsupportedField("media_io_kwargs", absent, MUST_BE_ABSENT),
)


def plan_texts(
    processor: PoolingProcessor, request: TextsRequest, info: RequestInfo, *, api: str, task: PoolingTask
) -> PoolingPlan:
    """The plan of a request for texts, token ids or conversations, whose model has been checked. Raises
    ApiError."""
    chat = request.messages is not None
    inputs = _conversations(processor, request) if chat else parse_inputs(processor, request.input, "input")
    plan = PoolingPlan(api=api, model=processor.model, task=task, inputs=inputs)
    set_shared_fields(plan, processor, request, info)
    plan.field = "messages" if chat else "input"
    plan.add_special_tokens = _else(request.add_special_tokens, not chat)
    plan.normalize = _else(request.use_activation, processor.normalizes)
    if not chat or request.prompt_name is not None:
        plan.prompt = processor.prompt(request.prompt_name)
    return plan


def set_shared_fields(
    plan: PoolingPlan, processor: PoolingProcessor, request: PoolingRequest, info: RequestInfo
) -> None:
    """Set what all requests may ask for. Raises ApiError."""
    side = request.truncation_side
    if side not in (None, "left", "right"):
        raise refused("truncation_side must be left or right.", "truncation_side", side)
    plan.truncate_left = side == "left"
    plan.truncate = truncation(processor, request.truncate_prompt_tokens)
    plan.activate = request.use_activation is not False
    plan.priority = request.priority or 0
    plan.request_id = request_id_of(info, request.request_id)


def parse_inputs(
    processor: PoolingProcessor,
    given: str | list[str | int | list[int]] | list[str] | None,
    field: str,
) -> Sequence[str | bytes]:
    """Texts, or token ids as int32 little-endian, of a field with one or more of them, which may be columns
    (:func:`~penstock.generation.prompt.prompts.token_columns`). Raises ApiError."""
    if given == "":
        return ("",)
    if isinstance(given, list) and given and not isinstance(given[0], int):
        check_count(len(given), field)
    return parse_prompts(cast(Any, given), processor.inputs.model_info.vocab_size, field)


def check_count(count: int, field: str) -> None:
    """Raises ApiError for more inputs than one request may have."""
    if count > MAX_INPUTS:
        raise refused(f"{field} has {count} inputs, at most {MAX_INPUTS} are allowed.", field)


def truncation(processor: PoolingProcessor, most: int | None) -> int | None:
    """``truncate_prompt_tokens`` of a request as :attr:`PoolingPlan.truncate`. Raises ApiError."""
    if most == -1:
        return processor.max_tokens
    if most is not None and not 1 <= most <= processor.max_tokens:
        raise refused(
            f"truncate_prompt_tokens must be -1 or in [1, {processor.max_tokens}], got {shown(most)}.",
            "truncate_prompt_tokens",
            most,
        )
    return most


def request_id_of(info: RequestInfo, given: str | None) -> str | None:
    """The id that a request has been given, in its header or else in its body. Raises ApiError."""
    if info.request_id is not None and len(info.request_id) > MAX_REQUEST_ID:
        raise ApiError(400, f"X-Request-Id is longer than {MAX_REQUEST_ID} characters.", param="X-Request-Id")
    return info.request_id or given


def _conversations(processor: PoolingProcessor, request: TextsRequest) -> list[str]:
    """The texts of a request's conversations. Raises ApiError."""
    if request.input is not None:
        raise refused("Only one of input and messages may be sent.", "messages")
    given = request.messages or []
    several = [each for each in given if isinstance(each, list)]
    if several and len(several) < len(given):
        raise refused("messages must be messages, or lists of them, not a mix.", "messages")
    check_count(len(several), "messages")
    opening = opens_turn(request.add_generation_prompt or False, request.continue_final_message)
    texts = []
    for messages in several or [[each for each in given if isinstance(each, Message)]]:
        _check_content(messages)
        text = processor.inputs.render(
            messages,
            add_generation_prompt=opening,
            continue_final_message=bool(request.continue_final_message),
            variables=request.chat_template_kwargs,
        )
        texts.append(text)
    return texts


def _check_content(messages: list[Message]) -> None:
    """Raises ApiError for what the model cannot read: a vector of the rest would be that of another input."""
    for number, message in enumerate(messages):
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, Part) and part.type in UNSUPPORTED_PARTS:
                field = f"messages[{number}].content"
                raise refused(f"{field} must be text, got a part of type {shown(part.type)}.", field)


def _else(value: bool | None, default: bool) -> bool:
    return default if value is None else value
