"""Limits of reasoning in tokens: what requests ask for, and the marks by which an engine ends reasoning."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from penstock.config.serve import ServeConfig
from penstock.generation.parsers import harmony
from penstock.generation.parsers.registry import OutputFormat
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.generation.request.reasoning_effort import reasoning_variables
from penstock.http.errors import ApiError, refused
from penstock.wire.messages import ThinkingLimit

FIELD = "thinking_token_budget"
MAX_BUDGET = (1 << 31) - 1
_NO_MARK = (
    "the format of the model's reasoning is unknown, or no token of its own begins and ends it "
    "(--reasoning-parser)"
)
_NO_ENGINE = (
    "vLLM's engine ends reasoning only if it knows the marks: add --reasoning-config to its arguments, "
    'behind --, such as \'{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}\''
)
_Ids = tuple[int, ...]
_HARMONY_ANSWER = (
    f"{harmony.END}{harmony.START}assistant",
    f"{harmony.CHANNEL}{harmony.FINAL}{harmony.MESSAGE}",
)


class ThinkingPolicy:
    """How the reasoning of one served model is limited."""

    def __init__(self, config: ServeConfig, format: OutputFormat, tokenizer: Tokenizer) -> None:
        self._format = format
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.raw.get_added_tokens_decoder())
        self._efforts = config.reasoning_efforts
        self._of = cache(self._marks)
        self.unavailable = ""
        """Why reasoning cannot be limited; empty: it can."""
        if (config.engine == "vllm" or config.attach is not None) and not _knows_marks(config):
            self.unavailable = _NO_ENGINE
        elif self._of(False) is None:
            self.unavailable = _NO_MARK

    def limit(self, budget: int) -> ThinkingLimit | None:
        """The limit that a request asks for by ``thinking_token_budget``. Raises ApiError."""
        if budget == -1:
            return None
        if budget < 0:
            raise refused(f"`{FIELD}` must be a non-negative integer or -1 for unlimited.", FIELD, budget)
        marks = None if self.unavailable else self._of(False)
        if marks is None:
            raise ApiError(400, f"{FIELD}: {self.unavailable}.", param=FIELD)
        return ThinkingLimit(min(budget, MAX_BUDGET), *marks)

    def after(self, thinking: ThinkingLimit, prompt: str, *, calls: bool) -> ThinkingLimit:
        """The limit for an output that follows the text ``prompt``. ``calls``: it may have tool calls, which
        end reasoning, too."""
        marks = self._of(calls)
        assert marks is not None
        return ThinkingLimit(thinking.budget, *marks, opened=self._format.reasons_after(prompt))

    def effort(
        self, effort: str | None, field: str, variables: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, int | None]:
        """The variables of the chat template for an ``effort``, and its budget; None: it has none. ``field``:
        of the effort. Raises ApiError."""
        variables = reasoning_variables(effort, field, variables, self._efforts)
        budget = None if effort is None or self.unavailable else self._efforts.get(effort)
        return variables, budget if isinstance(budget, int) else None

    def _marks(self, calls: bool) -> tuple[tuple[_Ids, ...], tuple[_Ids, ...], _Ids, _Ids] | None:
        """Starts, ends, and what is forced at first and later; None: some have no tokens of their own."""
        if self._format.harmony:
            analysis = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
            starts, ends = self._ids([analysis]), self._ids(harmony.MESSAGE_ENDS)
            closing, answer = (self._encode(text) for text in (_HARMONY_ANSWER[0], "".join(_HARMONY_ANSWER)))
            whole = bool(starts) and len(ends) == len(harmony.MESSAGE_ENDS)
            return (starts, ends, closing if calls else answer, answer) if whole else None
        reasoning, tools = self._format.reasoning, self._format.tools
        if reasoning is None:
            return None
        closes = self._ids(reasoning.closes)
        starts = self._ids(reasoning.opens)
        if not starts or not closes:
            return None
        others = self._ids((*reasoning.ends, *(tools.opens if calls and tools is not None else ())))
        return starts, tuple(dict.fromkeys((*closes, *others))), closes[0], closes[0]

    def _ids(self, texts: Iterable[str]) -> tuple[_Ids, ...]:
        """The token ids of those of ``texts`` that added tokens begin and end: of others the tokens depend on
        the text around."""
        found = [self._encode(text) for text in texts]
        return tuple(ids for ids in found if ids and ids[0] in self._added and ids[-1] in self._added)

    def _encode(self, text: str) -> _Ids:
        return tuple(self._tokenizer.encode(text, False))


def _knows_marks(config: ServeConfig) -> bool:
    flags = [argument.replace("_", "-") for argument in config.engine_args or ()]
    return any(flag.startswith(("--reasoning-config", "--reasoning-parser")) for flag in flags)
