"""A child process that validates grammars: one that crashes the validator, or takes too long, ends only it.

llguidance recurses as deep as rules refer to one another, so that a grammar of 36 kB can overflow the stack,
which kills the process. A child validates with a smaller stack than that of the engine's threads: what it has
accepted does not crash an engine.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import threading
from typing import IO

import msgspec

from penstock.engine.sampling.grammar_limits import in_words
from penstock.generation.grammars.validation import Question, ValidationResult

MEMORY_LIMIT = 2 << 30
"""Address space of a child in bytes."""
STACK_BYTES = 2 << 20
"""Stack for one grammar: a quarter of the usual one of threads. Enough for JSON schemas of 100 objects, each
inside the previous one."""

_SIZE_BYTES = 8
TOO_COMPLEX = "it is too complex: its rules are nested too deeply, or it needs too much memory"


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(Question).decode
_decode_verdict = msgspec.msgpack.Decoder(ValidationResult).decode


class GrammarProcess:
    """One child, started when it is first needed and again after it has died. Used by one thread at once."""

    def __init__(self, cpu_limit_s: float) -> None:
        """``cpu_limit_s``: CPU time for one grammar."""
        self._cpu_limit_s = cpu_limit_s
        self._child: subprocess.Popen[bytes] | None = None

    def validate(self, question: Question) -> ValidationResult | None:
        """Block until the grammar is validated; None: it takes more CPU time than there is. What else kills
        the child is a problem of the grammar."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _write(child.stdin, _encode(question))
            return _decode_verdict(_read(child.stdout))
        except (EOFError, OSError):
            self._child = None
            return None if _reaped(child) == -signal.SIGVTALRM else ValidationResult(problem=TOO_COMPLEX)

    def close(self) -> None:
        """End the child, in the middle of a grammar too."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            _reaped(child)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self.close()  # it was killed while idle
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._cpu_limit_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._child


def _reaped(child: subprocess.Popen[bytes]) -> int:
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    return child.wait()


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Raises EOFError at the end."""
    size = pipe.read(_SIZE_BYTES)
    if len(size) < _SIZE_BYTES:
        raise EOFError
    data = pipe.read(length := int.from_bytes(size, "little"))
    if len(data) < length:
        raise EOFError
    return data


# -- in the child


def main() -> None:
    """Validate grammars until the parent closes the pipe. The argument is the CPU time for each."""
    cpu_limit_s = float(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(cpu_limit_s,))
    worker.start()
    worker.join()


def _serve(cpu_limit_s: float) -> None:
    while True:
        try:
            question = _decode_question(_read(sys.stdin.buffer))
        except EOFError:
            return
        # Unlike a handler, the signal's default action ends the process within llguidance's code, too.
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_limit_s)
        verdict = _validated(question)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _write(sys.stdout.buffer, _encode(verdict))


def _validated(question: Question) -> ValidationResult:
    from llguidance import LLMatcher, grammar_from

    from penstock.generation.grammars.embedded_schemas import rewritten_grammar
    from penstock.generation.grammars.schema_check import check_schema
    from penstock.generation.grammars.text_match import LIMITS

    try:
        if question.kind == "json_schema":
            return check_schema(question.grammar, question.loose)
        given = question.grammar
        grammar = grammar_from("grammar", given) if question.kind == "gbnf" else rewritten_grammar(given)
        problem = LLMatcher.validate_grammar(grammar, limits=LIMITS)
        return ValidationResult("" if grammar == given else grammar, in_words(problem.strip()))
    except RecursionError:
        return ValidationResult(problem=TOO_COMPLEX)
    except (ValueError, RuntimeError, MemoryError) as error:
        return ValidationResult(problem=str(error) or "it needs too much memory")


if __name__ == "__main__":
    main()
