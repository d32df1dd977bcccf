"""What a chat template takes.

Templates differ in how they want a message's fields: content as a text or as a list of parts, arguments as an
object or as JSON, reasoning under one of several names; and in what they drop or refuse. A conversation that
is spelled by these rules is rendered without loss, wherever its template can express it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

CALLS = "calls"
"""The kind of an assistant's message with tool calls; the kind of any other message is its role."""
START = "start"
"""What the first message of a conversation follows."""
SYSTEM_ROLES = frozenset({"system", "developer"})
THINKING_PART = "thinking part"
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "thought")
"""Fields that templates read reasoning from. Some read parts of the type thinking instead."""

PlainMessage = dict[str, Any]
"""A message as templates read it."""


class CallIds(Enum):
    """What ids of calls a template takes."""

    ANY = auto()
    SHORT = auto()
    """Nine characters, as Mistral's."""
    NAMED = auto()
    """``functions.NAME:NUMBER``, counted over the conversation, as Kimi K2's: nothing else shows the name."""


class BeforeCalls(NamedTuple):
    """What a template writes before the name of a message's first call."""

    lead: str
    """White space between the beginning of the assistant's turn and text."""
    start: str
    """What is between the beginning of the assistant's turn and the name."""


class TemplateRules(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of a template that cannot be told: it renders none of the conversations."""

    as_text: frozenset[str] = frozenset({"system", "developer", "user", "assistant", CALLS, "tool"})
    """Kinds of messages whose content may be a text."""
    as_parts: frozenset[str] = frozenset()
    """Kinds of messages whose content may be a list of several parts."""
    as_part: frozenset[str] = frozenset()
    """Kinds of messages whose content must be a list of one part."""
    absent: tuple[Any, ...] = ("",)
    """What may stand for no content beside calls: None, UNSET (no such field), a text or a list."""
    calls: bool = True
    """Whether calls are shown."""
    object_arguments: bool = True
    """Whether arguments are objects; otherwise they are the text of JSON objects."""
    text_arguments: bool = True
    """Whether arguments may be a text that is no JSON object."""
    parallel: bool = True
    """Whether a message may have several calls."""
    beside: bool = True
    """Whether text beside calls is shown."""
    before_calls: BeforeCalls | None = None
    """Where text beside calls is not shown: what it can be written before."""
    results: bool = True
    """Whether messages of tools are shown."""
    stray_results: bool = True
    """Whether those are shown that no call precedes."""
    ids: CallIds = CallIds.ANY
    reasoning: tuple[str, ...] = REASONING_NAMES[:2]
    """The fields for reasoning, or THINKING_PART."""
    no_tools: tuple[()] | None = None
    """What stands for no tools: None, or an empty list for templates that loop over them anyway."""
    function_fields: tuple[str, ...] = ()
    """What a function must have besides its name: of FUNCTION_FIELDS, EMPTY_SCHEMA and PROPERTIES."""
    head_always: bool = True
    """Whether a system message at the start is shown whatever the last message is; otherwise only before a
    user's."""
    head_alone: bool = True
    """Whether it is shown if there is no other message."""
    empty_answers: bool = True
    """Whether the assistant's messages may be empty."""
    cut_at: tuple[tuple[str, str], ...] = ()
    """Marks around reasoning, as ``<think>`` and ``</think>``, at which text of the assistant is cut."""
    cut_beside_reasoning: bool = False
    """Whether that is so in messages with reasoning, too."""
    image_text: str = ""
    """What the template writes for a picture; empty: the model takes none."""
    pictures: frozenset[str] = frozenset()
    """Kinds of messages, of user and tool, whose content may have parts that are pictures; elsewhere
    ``image_text`` is written into texts."""
    refused: frozenset[tuple[str, str]] = frozenset()
    """Kinds of messages (PLACES), each with what it may not follow, or not without loss."""
    stable: frozenset[tuple[str, str]] = frozenset()
    """Kinds of system messages, each with what it follows, that stay there and leave the prompt before as it
    is."""

    @property
    def shows_reasoning(self) -> bool:
        """Whether reasoning was found in a prompt."""
        return len(self.reasoning) == 1

    def may_follow(self, kind: str, before: str) -> bool:
        """Whether a message may follow another one."""
        return (kind, before) not in self.refused


PLACES = frozenset(
    [
        (kind, before)
        for kind in SYSTEM_ROLES
        for before in (START, "system", "user", "assistant", CALLS, "tool")
    ]
    + [("user", before) for before in ("user", CALLS, "tool")]
    + [("assistant", before) for before in (START, "system", "assistant", CALLS)]
    + [(CALLS, before) for before in (START, "system", "assistant", CALLS, "tool")]
    + [("tool", before) for before in ("system", "developer", "user", "assistant")]
)
"""Kinds of messages, each with what it follows, that templates may refuse."""

FUNCTION_FIELDS: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""What stands for an absent field of a function where a template needs it."""
EMPTY_SCHEMA = "empty schema"
"""Parameters that are an empty object become those of FUNCTION_FIELDS."""
PROPERTIES = "properties"
"""Parameters without properties get none."""
PARAMETER_DESCRIPTIONS = "parameter descriptions"
"""Parameters without a description get an empty one."""
