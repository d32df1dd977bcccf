"""The streams of a synthetic engine with a script: which tokens come next, when, and how they end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.synthetic.cut_reasoning import cut_reasoning
from penstock.engine.synthetic.script import CompiledScript, ScriptedReply
from penstock.wire.arrays import I8
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Submit
from penstock.wire.submits import prompt_without_output

RECENT_PROMPTS = 16
"""Prompts whose replies are kept from the check of a request to its start."""
EXIT_CODE_OF_FAULT = 70
"""Exit code of an engine that a fault or a script ends (EX_SOFTWARE of sysexits.h)."""


class Played(NamedTuple):
    """What a step has played."""

    slots: NDArray[np.intp]
    """Slots with tokens to send."""
    finish: I8
    """The FinishReason of each."""
    resting: NDArray[np.intp]
    """The others."""
    failing: dict[int, str]
    """Messages of streams that fail now, by slot."""


@dataclass(slots=True)
class _Stream:
    reply: ScriptedReply
    due: float
    """Time of the next token."""
    end: str
    """How it ends; a rule's end applies to some of its replies only."""
    length: int
    """Tokens of the reply up to its end."""


class ScriptPlayer:
    """Plays replies into the slots of an engine."""

    def __init__(
        self,
        script: CompiledScript,
        table: SlotTable,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._script = script
        self._table = table
        self._clock = clock
        self._sleep = sleep
        self._eos = int(table.eos[0]) if len(table.eos) else 0
        self._answer = lru_cache(RECENT_PROMPTS)(self._find)
        self._streams: dict[int, _Stream] = {}
        """Streams by slot. A slot's next stream replaces its last one."""
        self._ended = Counter[int]()
        """Replies that ended as their rule says, by rule."""

    def check(self, request: Submit) -> None:
        """Raises RequestRejected if no rule matches."""
        self._answer(prompt_without_output(request), request.sampling.grammar)

    def begin(self, slot: int, request: Submit) -> None:
        """A stream gets a slot."""
        prompt = prompt_without_output(request)
        reply = self._answer(prompt, request.sampling.grammar)
        rule, limit = reply.rule, request.sampling.thinking
        if limit is not None:
            reply = replace(reply, tokens=cut_reasoning(reply.tokens, prompt, limit))
        end: str = rule.end
        if rule.end_times is not None and self._ended[reply.number] >= rule.end_times:
            end = "stop"
        if end in ("exit", "hang") and request.resubmitted:
            end = "stop"  # it has ended another engine
        length = len(reply.tokens)
        if end == rule.end:
            self._ended[reply.number] += 1
            length = min(length, rule.after_tokens or length)
        if end == "stop" and not len(self._table.eos):
            end = "length"
        wait = 0.0 if request.resumed else rule.pace.first_token_ms / 1000
        self._streams[slot] = _Stream(reply, self._clock() + wait, end, length)

    def step(self, slots: NDArray[np.intp], now: float) -> Played:
        """Append the tokens that are due."""
        sending: list[int] = []
        finish: list[int] = []
        resting: list[int] = []
        failing: dict[int, str] = {}
        for slot in slots.tolist():
            stream = self._streams[slot]
            reason = 0
            if now >= stream.due and not self._is_through(slot, stream):
                reason = self._append(slot, stream)
                stream.due = now + stream.reply.rule.pace.token_ms / 1000
            elif now >= stream.due and stream.end == "stall":
                self._table.flush_next(slot)
            elif now >= stream.due:
                if stream.end != "error":
                    break_engine(stream.end, self._sleep)
                failing[slot] = (
                    f"rules[{stream.reply.number}] of the synthetic script ends this reply by an error"
                )
            if self._table.length[slot] > self._table.sent[slot]:
                sending.append(slot)
                finish.append(reason)
            else:
                resting.append(slot)
        return Played(
            np.array(sending, np.intp), np.array(finish, np.int8), np.array(resting, np.intp), failing
        )

    def _find(self, prompt: bytes, grammar: str | None) -> ScriptedReply:
        return self._script.answer(np.frombuffer(prompt, "<i4").tolist(), grammar)

    def _position(self, slot: int) -> int:
        return int(self._table.length[slot] - self._table.base[slot])

    def _is_through(self, slot: int, stream: _Stream) -> bool:
        """Whether all tokens are appended of a stream that ends neither by EOS nor by its length."""
        return stream.end not in ("stop", "length") and self._position(slot) >= stream.length

    def _append(self, slot: int, stream: _Stream) -> int:
        """Append a step's tokens of one stream. Returns its FinishReason."""
        one = np.array([slot], np.intp)
        tokens = stream.reply.tokens
        reason = 0
        for _ in range(stream.reply.rule.pace.tokens_per_step):
            position = self._position(slot)
            if position < stream.length:
                token = tokens[position]
            elif stream.end in ("stop", "length"):
                token = self._eos
            else:
                break  # it ends in the next step
            reason = int(self._table.append_and_check_stop(one, np.array([token], np.int32))[0])
            if reason:
                break
            if stream.end == "length" and position + 1 >= stream.length:
                return FinishReason.LENGTH
        return reason


def break_engine(how: str, sleep: Callable[[float], None]) -> NoReturn:
    """End this process (``exit``), or keep it from going on (``hang``)."""
    if how == "exit":
        os._exit(EXIT_CODE_OF_FAULT)
    while True:
        sleep(3600)
