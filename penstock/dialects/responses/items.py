"""Turns the items of a conversation into the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.dialects.responses.reasoning_content import open_reasoning
from penstock.dialects.responses.request_schema import ContentPart, InputItem
from penstock.dialects.responses.tools import function_name
from penstock.generation.compaction.compaction import KeptRoom, kept, summary_message
from penstock.generation.media.source import image_at, image_of
from penstock.generation.parsers.custom_input import CUSTOM_INPUT
from penstock.generation.request.schemas import FunctionCall, Message, Part, ToolCall
from penstock.generation.request.unsupported_content import UNSUPPORTED_PARTS, UnsupportedContent, as_parts
from penstock.http.errors import ApiError, encode_json, not_served, shown

ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "reasoning",
    "compaction",
    "item_reference",
)
TRIGGER = "compaction_trigger"
"""The type of an item that asks for the compaction of all before it."""
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""Names that clients have for the type of an item that stands for the conversation before it."""
ROLES = ("user", "assistant", "system", "developer")
_IMAGES = ("input_image", "computer_screenshot", "image_url")
"""Types of parts that are images; the last one is that of chat completions."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class OpenedSummaries(Protocol):
    """What opens compaction items."""

    @property
    def room(self) -> KeptRoom: ...
    def text(self, item: InputItem, field: str) -> str: ...


@dataclass(slots=True)
class _AssistantTurn:
    """The items of one turn of the assistant. They are joined once: there may be thousands."""

    message: Message
    reasoning: list[str] = field(default_factory=list)
    contents: list[str | list[str | Part]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def write(self) -> None:
        """Set the message's fields."""
        message = self.message
        message.reasoning_content = "\n".join(self.reasoning) if self.reasoning else None
        message.content = _joined(self.contents)
        message.tool_calls = list(self.calls) or None


class Conversation:
    """The messages of a request, added item by item.

    Reasoning, text and calls of the assistant in a row are one message, as the model wrote them.
    """

    def __init__(
        self,
        unsupported: UnsupportedContent,
        *,
        summaries: OpenedSummaries | None = None,
    ) -> None:
        """``unsupported`` notes pictures, and what the model cannot see. ``summaries``: None refuses
        compaction items."""
        self.unsupported = unsupported
        self._summaries = summaries
        self._summary: Message | None = None
        """What stands for the messages before it."""
        self._messages: list[Message] = []
        self._turn: _AssistantTurn | None = None
        """The last message, if it is the assistant's."""
        self._names: dict[str, str] = {}
        """Names of called functions by call id."""

    @property
    def messages(self) -> list[Message]:
        """The messages so far."""
        if self._turn is not None:
            self._turn.write()
        return self._messages

    def append(self, message: Message) -> None:
        """Add a message that is not the assistant's."""
        if self._turn is not None:
            self._turn.write()
            self._turn = None
        self._messages.append(message)

    def add(self, items: Iterable[InputItem], field: str) -> None:
        """``field``: path of the items in the request, for errors. Raises ApiError."""
        for number, item in enumerate(items):
            self._add(item, f"{field}[{number}]")

    def _add(self, item: InputItem, field: str) -> None:
        match item.type or "message":
            case "message":
                self._message(item, field)
            case "reasoning":
                text = self._reasoning(item, field)
                turn = self._assistant()
                if text:
                    turn.reasoning.append(text)
            case "function_call":
                self._call(item, item.arguments or "", field)
            case "custom_tool_call":
                self._call(item, encode_json({CUSTOM_INPUT: item.input or ""}).decode(), field)
            case "computer_call":
                said = item.actions if item.actions is not None else item.action
                self._called("computer", item.call_id, encode_json({"actions": said}).decode(), field)
            case "image_generation_call":
                self._assistant().contents.append(self._generated(item, field))
            case "function_call_output" | "custom_tool_call_output" | "computer_call_output":
                call_id = _needed(item.call_id, f"{field}.call_id")
                if item.output is None:
                    raise _missing(f"{field}.output")
                content = self._content(item.output, f"{field}.output")
                self.append(
                    Message(role="tool", content=content, tool_call_id=call_id, name=self._names.get(call_id))
                )
            case name if name in COMPACTIONS or name == TRIGGER:
                self._compact(item, field)
            case "item_reference":  # with an id, it is another item by now
                raise _missing(f"{field}.id")
            case unknown:
                raise ApiError(
                    400,
                    f"{field}: items of type {shown(unknown)!r} are not supported, only "
                    f"{', '.join(ITEM_TYPES)}.",
                    param=f"{field}.type",
                )

    def _compact(self, item: InputItem, field: str) -> None:
        """Replace the messages so far by what an item has. Raises ApiError."""
        summaries = self._summaries
        if summaries is None or item.type == TRIGGER:
            why = "is not for this model server" if summaries is None else "must be the last item of input"
            raise ApiError(400, f"{field}: an item of type {item.type} {why}.", param=f"{field}.type")
        self.compact(summaries.text(item, field), summaries.room)

    def compact(self, summary: str, room: KeptRoom) -> None:
        """Replace the messages so far by their summary and by what stays beside it, of the user's what fits
        ``room``."""
        before = [message for message in self.messages if message is not self._summary]
        self._turn, self._summary = None, summary_message(summary)
        self._messages = [*kept(before, room), self._summary]

    def _message(self, item: InputItem, field: str) -> None:
        role = _needed(item.role, f"{field}.role")
        if role not in ROLES:
            raise ApiError(
                400,
                f"{field}.role must be one of {', '.join(ROLES)}, got {shown(role)!r}.",
                param=f"{field}.role",
            )
        if item.content is None:
            raise _missing(f"{field}.content")
        content = self._content(item.content, f"{field}.content")
        if role != "assistant":
            self.append(Message(role=role, content=content))
            return
        self._assistant().contents.append(content)

    def _assistant(self) -> _AssistantTurn:
        """The assistant's turn, which its last items belong to."""
        if self._turn is None:
            self._turn = _AssistantTurn(Message(role="assistant"))
            self._messages.append(self._turn.message)
        return self._turn

    def _call(self, item: InputItem, arguments: str | dict[str, object], field: str) -> None:
        name = function_name(item.namespace, _needed(item.name, f"{field}.name"))
        self._called(name, item.call_id, arguments, field)

    def _called(self, name: str, id: str | None, arguments: str | dict[str, object], field: str) -> None:
        call_id = _needed(id, f"{field}.call_id")
        self._names[call_id] = name
        call = ToolCall(function=FunctionCall(name=name, arguments=arguments), id=call_id)
        self._assistant().calls.append(call)

    # -- content

    def _content(self, content: str | list[ContentPart] | ContentPart, field: str) -> str | list[str | Part]:
        if isinstance(content, str):
            return content
        if isinstance(content, ContentPart):  # of a computer
            part = self._part(content, field)
            return part if isinstance(part, str) else [part]
        parts = [self._part(part, f"{field}[{place}]") for place, part in enumerate(content)]
        first = parts[0] if len(parts) == 1 else None
        return first if isinstance(first, str) else [part for each in parts for part in _parts(each)]

    def _part(self, part: ContentPart, field: str) -> str | Part:
        """The text of a part, or the image that the model sees."""
        if part.type not in _IMAGES or not self.unsupported.sees_images:
            return self._text(part, field)
        if part.image_url is None and part.file_id is not None:
            raise not_served(f"{field}.file_id", "there are no files here; send image_url")
        given, place = part.image_url, f"{field}.image_url"
        if isinstance(given, dict):  # as chat completions have it
            given, place = given.get("url"), f"{place}.url"
        return self.unsupported.see(image_at(given, place, part.detail, f"{field}.detail"))

    def _generated(self, item: InputItem, field: str) -> str | list[str | Part]:
        """The image that a tool of OpenAI's has made."""
        if not self.unsupported.sees_images or item.result is None:
            return self.unsupported.add("image", field)
        return [self.unsupported.see(image_of(item.result, f"{field}.result"))]

    def _texts(self, parts: Iterable[ContentPart], field: str) -> list[str]:
        return [self._text(part, f"{field}[{place}]") for place, part in enumerate(parts)]

    def _text(self, part: ContentPart, field: str) -> str:
        if part.type == "refusal":
            return _needed(part.refusal, f"{field}.refusal")
        if part.type in UNSUPPORTED_PARTS:
            return self.unsupported.add(UNSUPPORTED_PARTS[part.type], field)
        if part.type not in _TEXTS:
            raise ApiError(
                400,
                f"{field}: parts of type {shown(part.type)!r} are not supported, only text, images, "
                "recordings, videos and files.",
                param=f"{field}.type",
            )
        return _needed(part.text, f"{field}.text")

    def _reasoning(self, item: InputItem, field: str) -> str:
        """The text that the model reasoned: whatever the client has kept of it."""
        if isinstance(item.content, str):
            return item.content
        if item.content:
            return "\n".join(self._texts(item.content, f"{field}.content"))
        if item.encrypted_content:
            text = open_reasoning(item.encrypted_content)
            if text is not None:
                return text
        return "\n".join(self._texts(item.summary or (), f"{field}.summary"))


def _joined(contents: list[str | list[str | Part]]) -> str | list[str | Part] | None:
    """Texts as one text, a line each; parts, and texts among them, as parts."""
    if not contents:
        return None
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    return [part for content in contents for part in _parts(content)]


def _parts(content: str | Part | list[str | Part]) -> list[str | Part]:
    return [content] if isinstance(content, Part) else as_parts(content)


def _needed(value: str | None, field: str) -> str:
    if value is None:
        raise _missing(field)
    return value


def _missing(field: str) -> ApiError:
    return ApiError(400, f"{field} is missing.", param=field)
