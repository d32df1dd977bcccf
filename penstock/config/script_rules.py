"""The rules of ``--synthetic-script``, as its file has them. The format is described in
docs/synthetic-script.md. Keys are spelled with dashes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Milliseconds: TypeAlias = Annotated[float, Meta(ge=0, le=3_600_000)]
Number: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
End: TypeAlias = Literal["stop", "length", "error", "stall", "exit", "hang"]

MAX_SCRIPT_BYTES = 512 * 1024
"""Size of a script, and of the replies that it spells. Engines get them in one message of their start."""


class ScriptPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Base of the parts of a script."""


class PromptMatch(ScriptPart, frozen=True):
    """Conditions on the prompt, all of which must hold; a rule without any matches every prompt.

    A turn is the messages of the user and of tools since the model's last reply.
    """

    last: Literal["user", "tool"] | None = None
    """Whether results of tools are among the turn's messages."""
    text: Text | list[Text] | None = None
    """Text, or all the texts, that the turn contains."""
    regex: Text | None = None
    """Pattern to find in the turn."""
    tool: Text | None = None
    """Name of a tool whose result is in the turn."""
    turn: Number | None = None
    """Number of the turn in its conversation, from 1."""
    prompt: Text | None = None
    """Pattern to find in the whole prompt."""


class Call(ScriptPart, frozen=True):
    """A tool call. Arguments given as a text are that text."""

    name: Text
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)


class Reply(ScriptPart, frozen=True):
    """What the model writes: text, reasoning and calls, spelled in its format; or ``output``, as it is."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []
    output: str | None = None


class Pace(ScriptPart, frozen=True):
    """When the tokens of a reply come."""

    first_token_ms: Milliseconds = 0.0
    """Time until the first token."""
    token_ms: Milliseconds = 0.0
    """Minimum time from one step with tokens to the next."""
    tokens_per_step: Annotated[int, Meta(ge=1, le=1024)] = 1


class ScriptRule(ScriptPart, frozen=True):
    """One rule. The first that matches answers."""

    match: PromptMatch = PromptMatch()
    times: Number | None = None
    """How often the rule answers within one conversation; None: no limit."""
    reply: Reply = Reply()
    pace: Pace = Pace()
    end: End = "stop"
    after_tokens: Number | None = None
    """Tokens after which the reply ends; None: all."""
    end_times: Number | None = None
    """How many replies an engine process ends in this way; later ones stop. None: no limit."""


class Script(ScriptPart, frozen=True):
    rules: Annotated[list[ScriptRule], Meta(min_length=1, max_length=10_000)]
