"""Requests of ``/v1/messages`` as chat completions."""

from __future__ import annotations

from functools import partial

from penstock.dialects.messages.block_texts import BlockTexts
from penstock.dialects.messages.conversation import convert_messages
from penstock.dialects.messages.output_schema import output_schema
from penstock.dialects.messages.reply import MessageFields, MessagesReply
from penstock.dialects.messages.request_schema import UNSUPPORTED, MessagesRequest
from penstock.dialects.messages.thinking import parse_thinking
from penstock.dialects.messages.tools import convert_choice, convert_tools
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
from penstock.generation.request.unsupported import UnsupportedFieldCheck
from penstock.generation.request.unsupported_content import UnsupportedContent

_SAME = (
    "model",
    "stream",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
_decoder = BodyDecoder(MessagesRequest, strict=False)
_unsupported = UnsupportedFieldCheck(UNSUPPORTED)


def translate_messages(raw: bytes, request_id: str) -> TranslatedRequest:
    """Raises ApiError for what no chat server can do."""
    request = _decoder.decode(raw)
    _unsupported.check_fields(request)
    thinking, content = parse_thinking(request), UnsupportedContent(sees_images=True)
    choice, config = request.tool_choice, request.output_config
    fields = same_fields(request, _SAME)
    fields["messages"] = chat_messages(convert_messages(request, BlockTexts(content)), content)
    fields |= tool_fields(
        convert_tools(request.tools),
        convert_choice(choice),
        one_call=choice is not None and bool(choice.disable_parallel_tool_use),
    )
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    if (wanted := output_schema(request)) is not None:
        fields |= schema_format(wanted.schema)
    if config is not None:
        fields |= effort_fields(config.effort)
    reply = MessageFields(
        id=f"msg_{request_id}",
        model=request.model or "",
        request_id=request_id,
        omit_thinking=thinking.omitted,
        max_tokens=request.max_tokens,
    )
    warnings = filter(None, (thinking.warning, content.warning("messages")))
    return TranslatedRequest(
        fields,
        partial(MessagesReply, reply),
        MessageFormat(show_reasoning=thinking.shown),
        "; ".join(warnings) or None,
    )
