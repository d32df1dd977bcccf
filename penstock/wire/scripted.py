"""The script of a synthetic engine as its process gets it: replies are texts that a model would write."""

from __future__ import annotations

import msgspec

from penstock.config.script_rules import End, Pace, PromptMatch


class ScriptedRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of the file, see :class:`penstock.config.script_rules.ScriptRule`."""

    match: PromptMatch
    times: int | None = None
    outputs: list[str]
    """The reply in the model's own format; then less of it, as a request's grammar may ask."""
    forced: list[str] = []
    """The reply in formats of grammars that leave no text free."""
    verbatim: bool = False
    """Whether grammars do not apply."""
    pace: Pace = Pace()
    end: End = "stop"
    after_tokens: int | None = None
    end_times: int | None = None
