"""Answers prompts by the rules of ``--synthetic-script``.

A reply is a function of the prompt and the request's grammar alone: another engine, or the same one after a
restart, continues it where it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from penstock.engine.base import RequestRejected
from penstock.engine.synthetic.script_grammar import ReplyGrammars
from penstock.engine.synthetic.turns import Turn, turns_of
from penstock.wire.scripted import ScriptedRule

_PROSE = "Some text."
"""A grammar that takes it forces no format: calls in a format of its own would be text."""
_SHOWN = 200
"""Characters of a turn that an error shows."""


@dataclass(slots=True, frozen=True)
class ScriptedReply:
    """A rule's reply as tokens."""

    number: int
    """Index of the rule."""
    rule: ScriptedRule
    tokens: Sequence[int]
    """Token ids of the whole reply, without EOS."""


class CompiledScript:
    """The rules, with patterns compiled."""

    def __init__(
        self, rules: Sequence[ScriptedRule], tokenizer_dir: Path, vocab_size: int, eos: Sequence[int]
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._conditions = [_Conditions(rule) for rule in rules]
        self._rules = rules
        self._outputs = [[self._encode(output) for output in rule.outputs] for rule in rules]
        self._forced = [[self._encode(output) for output in rule.forced] for rule in rules]
        self._prose = self._encode(_PROSE)
        self._grammars = ReplyGrammars(tokenizer_dir, vocab_size, eos)

    def _encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answer(self, prompt: Sequence[int], grammar: str | None) -> ScriptedReply:
        """The reply to a prompt. Raises RequestRejected if no rule matches, or its reply not the grammar."""
        number = self._rule_for(prompt)
        rule, outputs = self._rules[number], self._outputs[number]
        if grammar is None or rule.verbatim:
            return ScriptedReply(number, rule, outputs[0])
        is_forced = not self._grammars.accepts(grammar, self._prose)
        for tokens in (*outputs, *(self._forced[number] if is_forced else ())):
            if self._grammars.accepts(grammar, tokens):
                return ScriptedReply(number, rule, tokens)
        raise RequestRejected(
            f"rules[{number}] of the synthetic script replies {_shown(rule.outputs[0])!r}, which the "
            "request's tools, tool_choice or output format do not allow"
        )

    def _rule_for(self, prompt: Sequence[int]) -> int:
        """The index of the rule that answers a prompt. Raises RequestRejected."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        turns = turns_of(text)
        answered = [0] * len(self._conditions)
        """Turns that each rule has answered."""
        found = None
        for number, turn in enumerate(turns, 1):
            found = next(
                (
                    index
                    for index, rule in enumerate(self._conditions)
                    if (rule.times is None or answered[index] < rule.times) and rule.hold(text, turn, number)
                ),
                None,
            )
            if found is not None:
                answered[found] += 1
        if found is None:
            kind = "with results of tools" if turns[-1].is_tool else "of the user"
            raise RequestRejected(
                f"no rule of the synthetic script matches turn {len(turns)} ({kind}): "
                f"{_shown(turns[-1].text)!r}"
            )
        return found


class _Conditions:
    """The conditions of one rule."""

    def __init__(self, rule: ScriptedRule) -> None:
        match = rule.match
        self.times = rule.times
        last = "tool" if match.tool is not None else match.last
        self._is_tool = None if last is None else last == "tool"
        self._texts = [match.text] if isinstance(match.text, str) else match.text or []
        self._regex = match.regex and re.compile(match.regex)
        self._called = match.tool and re.compile(
            rf"(?:(?<![\w.-])|(?<=\bfunctions\.)){re.escape(match.tool)}(?![\w.-])"
        )
        self._turn = match.turn
        self._prompt = match.prompt and re.compile(match.prompt)

    def hold(self, prompt: str, turn: Turn, number: int) -> bool:
        """Whether they hold for the ``number``-th turn of a prompt."""
        return (
            (self._is_tool is None or turn.is_tool == self._is_tool)
            and (self._turn is None or self._turn == number)
            and all(each in turn.text for each in self._texts)
            and (not self._regex or self._regex.search(turn.text) is not None)
            and (not self._called or self._called.search(turn.reply_before) is not None)
            and (not self._prompt or self._prompt.search(prompt, 0, turn.end) is not None)
        )


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
