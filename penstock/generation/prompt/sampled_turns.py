"""The next turn of a conversation whose latest answer comes with its token ids.

A prompt that is rendered and tokenized anew need not begin with the ids that were sampled: templates leave
out reasoning and spell calls in their own way, and a text has many tokenizations. Here the ids are taken as
they are. Only what follows the answer is rendered, behind a stand-in for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.generation.prompt.renderer import ConversationRenderer
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.generation.request.schemas import CustomCall, FunctionCall, Message, Tool, ToolCall
from penstock.http.errors import ApiError, shown

_STAND_IN = f"answer{secrets.token_hex(8)}"
"""Text of the answer where the template shows it; nobody can send it."""


class SampledPrompt(NamedTuple):
    """A prompt that begins with token ids."""

    prefix: bytes
    """int32 little-endian: prompt and output of the turn before, but for the end of that output."""
    text: str
    """What follows the prefix."""


def latest_sampled(messages: Sequence[Message]) -> int | None:
    """Place of the latest answer that has token ids; None: no message has."""
    for number in range(len(messages) - 1, -1, -1):
        if messages[number].token_ids is not None:
            return number
    return None


class SampledTurns:
    """Makes such prompts for one model."""

    def __init__(
        self,
        renderer: ConversationRenderer,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self._renderer = renderer
        self._ends = {
            id: tokenizer.raw.id_to_token(id) or "" for id in sorted({*tokenizer.special_ids, *eos_token_ids})
        }
        """Texts of tokens that may end an output."""
        self._eos = [text for id in eos_token_ids if (text := self._ends[id])]
        self._vocab_size = vocab_size

    def prompt(
        self,
        messages: Sequence[Message],
        at: int,
        *,
        add_generation_prompt: bool,
        tools: list[Tool] | None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> SampledPrompt:
        """The prompt of a conversation of which message ``at`` has token ids. Raises ApiError."""
        field = f"messages[{at}]"
        message = messages[at]
        if message.role != "assistant":
            raise ApiError(
                400,
                f"{field}.token_ids: a message of the assistant has them alone.",
                param=f"{field}.token_ids",
            )
        before = self._ids(message.prompt_token_ids, f"{field}.prompt_token_ids")
        sampled = self._ids(message.token_ids, f"{field}.token_ids")
        shown_text = self._renderer.render(
            [Message("user", "?"), self._stand_in(message, field, tools), *messages[at + 1 :]],
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=variables,
        )
        _, found, after = shown_text.partition(_STAND_IN)
        if not found:
            raise self._not_shown(field)
        end = self._ends.get(int(sampled[-1]), "")
        if message.tool_calls:
            after = self._behind_calls(after, end, field)
        if not end:  # the output was cut: the template ends the turn
            return SampledPrompt(before.tobytes() + sampled.tobytes(), after)
        # The token that ended the output is encoded with what follows, as its neighbour.
        text = after if after.startswith(end) else end + after
        return SampledPrompt(before.tobytes() + sampled[:-1].tobytes(), text)

    def _ids(self, ids: list[int] | None, field: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        if not ids:
            raise ApiError(
                400,
                f"{field} is needed, and not empty: send prompt_token_ids and token_ids of an answer as its "
                "reply had them (return_token_ids).",
                param=field,
            )
        if max(ids) >= self._vocab_size:
            raise ApiError(
                400,
                f"{field} has the token id {shown(max(ids))}, which is not in [0, {self._vocab_size - 1}].",
                param=field,
            )
        return np.array(ids, "<i4")

    def _stand_in(self, message: Message, field: str, tools: list[Tool] | None) -> Message:
        """A short answer in place of ``message``; it makes the same calls, so that results have theirs."""
        calls = message.tool_calls
        if not calls:
            return Message("assistant", _STAND_IN, name=message.name)
        if len(calls) > 1 and not self._renderer.rules(tools=bool(tools)).parallel:
            raise ApiError(
                400,
                f"{field}.token_ids: the chat template shows one call per message, and results between them; "
                "send messages without token ids.",
                param=f"{field}.token_ids",
            )
        *others, last = calls
        return replace(
            Message("assistant", None, name=message.name), tool_calls=[*others, _with_stand_in(last)]
        )

    def _behind_calls(self, after: str, end: str, field: str) -> str:
        """What the template writes after the calls: from the text that ends the turn on."""
        places = [place for text in ([end] if end else self._eos) if (place := after.find(text)) >= 0]
        if not places:
            raise self._not_shown(field)
        return after[min(places) :]

    @staticmethod
    def _not_shown(field: str) -> ApiError:
        return ApiError(
            400,
            f"{field}.token_ids: the chat template does not show where such an answer ends; send messages "
            "without token ids, or token ids to /inference/v1/generate.",
            param=f"{field}.token_ids",
        )


def _with_stand_in(call: ToolCall) -> ToolCall:
    if call.custom is not None:
        return replace(call, custom=CustomCall(call.custom.name, _STAND_IN))
    name = "" if call.function is None else call.function.name
    return replace(call, function=FunctionCall(name, {"value": _STAND_IN}))
