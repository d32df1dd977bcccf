"""Input and output of ``penstock complete`` and ``penstock chat``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from penstock.config.client import ClientConfig
from penstock.config.errors import ConfigError

if TYPE_CHECKING:  # httpx is not imported at startup
    from penstock.client import Answer

# Escape sequences from a model must not reach the terminal: control characters become visible symbols.
_VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE_CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """``text`` without escape sequences."""
    return text.translate(_VISIBLE_CONTROLS)


def sampling(config: ClientConfig) -> dict[str, Any]:
    """The sampling parameters that are set, as fields of a request."""
    values = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    values |= {"top_p": config.top_p, "seed": config.seed}
    return {name: value for name, value in values.items() if value is not None}


def text_or_stdin(text: str) -> str:
    """``text``; for ``-`` all of standard input without its last line break. Raises ConfigError."""
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
    """Write an answer to standard output as it arrives, then its statistics to standard error.

    An answer that ends early (ClientError, KeyboardInterrupt) is shown as far as it arrived, with a newline.
    """
    try:
        with contextlib.closing(iter(answer)) as pieces:
            for piece in pieces:
                sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
    finally:
        if answer.text and not answer.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
    if stats:
        print(answer.stats(), file=sys.stderr)


def report(error: Exception) -> int:
    """Print an error to standard error and return its exit code."""
    print(f"penstock: error: {error}", file=sys.stderr)
    return 1
