"""What the commands that talk to a server share: reading a message, writing an answer as it arrives."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from penstock.config.client import ClientConfig
from penstock.config.errors import ConfigError

if TYPE_CHECKING:  # httpx stays out of the start of the command line
    from penstock.client import Answer

# A model may write escape sequences, which a terminal would obey: it gets the symbols of control characters.
_HARMLESS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_HARMLESS |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


def sampling(config: ClientConfig) -> dict[str, Any]:
    """The sampling parameters that are set, as fields of a request; the server decides on the others."""
    values = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    values |= {"top_p": config.top_p, "seed": config.seed}
    return {name: value for name, value in values.items() if value is not None}


def text_or_stdin(text: str) -> str:
    """``text``, or for ``-`` all of standard input without its last line break. Raises ConfigError."""
    if text != "-":
        return text
    try:
        read = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 (byte {error.start})") from None
    if not read:
        raise ConfigError("standard input is empty")
    return read


def write(answer: Answer, *, stats: bool) -> None:
    """Write an answer to standard output as it arrives, then its figures to standard error.

    When it ends early (ClientError, KeyboardInterrupt), what has arrived stands there and its line is ended.
    """
    try:
        with contextlib.closing(iter(answer)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece.translate(_HARMLESS) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
    finally:
        if answer.text and not answer.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
    if stats:
        print(answer.stats(), file=sys.stderr)


def report(error: Exception) -> int:
    """Show a failure on standard error; returns the exit code for it."""
    print(f"penstock: error: {error}", file=sys.stderr)
    return 1
