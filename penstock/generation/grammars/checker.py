"""Validates the grammars of requests in child processes, and remembers which are valid."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from penstock.generation.grammars.validation import Question, ValidationResult
from penstock.generation.grammars.validation_queue import ValidationQueue
from penstock.generation.request.structured_output import (
    MAX_GRAMMAR_BYTES,
    Constraint,
    too_large,
)
from penstock.http.admission import overloaded

KNOWN_GRAMMARS = 4096
"""Maximum number of valid grammars that are remembered, by a digest of 16 bytes each."""
KNOWN_BYTES = 16 << 20
"""Maximum size of what they were rewritten to."""
QUICK_CPU_LIMIT_S = 0.25
"""CPU time for the first attempt at a grammar; most take less than 0.05 s."""
CPU_LIMIT_S = 3.0
"""CPU time for the second attempt."""
MAX_WAITING_BYTES = 16 << 20
"""Maximum size of all grammars that wait for a child or are validated."""


class GrammarChecker:
    """The validator of one API server."""

    def __init__(self) -> None:
        self._valid: OrderedDict[bytes, str] = OrderedDict()
        """What grammars were rewritten to, by digest; empty: it stays as it is."""
        self._valid_bytes = 0
        self._quick = ValidationQueue(QUICK_CPU_LIMIT_S)
        self._patient = ValidationQueue(CPU_LIMIT_S)
        """For grammars that took too long for the other one, where they would delay others."""
        self._waiting_bytes = 0

    async def check_grammar(self, constraint: Constraint, client: str = "") -> Constraint:
        """The constraint with its grammar as engines take it: GBNF is translated, JSON schemas are rewritten.
        ``client``: who sent it.

        Raises ApiError with the field and the reason if the grammar is invalid or takes too long to check,
        and 429 if too many wait to be checked.
        """
        text = constraint.grammar
        size = len(text)
        if size > MAX_GRAMMAR_BYTES:
            raise constraint.fault(too_large(size))
        loose = constraint.loose()
        digest = blake2b(text.encode() + repr((constraint.kind, loose)).encode(), digest_size=16).digest()
        known = self._valid.get(digest)
        if known is not None:
            self._valid.move_to_end(digest)
            return _as_taken(constraint, known)
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise overloaded("Too many grammars of other requests wait to be checked.")
        self._waiting_bytes += size
        try:
            verdict = await self._validate(Question(text, constraint.kind, loose), client)
        finally:
            self._waiting_bytes -= size
        if verdict.problem:
            raise constraint.fault(verdict.problem, verdict.path)
        self._remember(digest, verdict.grammar)
        return _as_taken(constraint, verdict.grammar)

    def _remember(self, digest: bytes, rewritten: str) -> None:
        self._valid_bytes += len(rewritten) - len(self._valid.pop(digest, ""))
        self._valid[digest] = rewritten
        while len(self._valid) > KNOWN_GRAMMARS or self._valid_bytes > KNOWN_BYTES:
            self._valid_bytes -= len(self._valid.popitem(last=False)[1])

    async def _validate(self, question: Question, client: str) -> ValidationResult:
        for queue in (self._quick, self._patient):
            verdict = await queue.validate(question, client)
            if verdict is not None:
                return verdict
        return ValidationResult(problem=f"it takes more than {CPU_LIMIT_S:g} s to check")

    def close(self) -> None:
        """End the child processes."""
        self._quick.close()
        self._patient.close()


def _as_taken(constraint: Constraint, rewritten: str) -> Constraint:
    return constraint._replace(grammar=rewritten, kind="llguidance") if rewritten else constraint
