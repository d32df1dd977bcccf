"""``penstock chat``: a conversation over HTTP, or one message with ``-q``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from penstock.cli import terminal
from penstock.cli.command import Command
from penstock.config.client import ChatConfig
from penstock.config.errors import ConfigError
from penstock.config.origins import Origins

if TYPE_CHECKING:  # httpx is not imported at startup
    from penstock.client import Client

GREETING = "Talking to {model} at {url}. /exit or Ctrl-D leaves, /clear starts over, Ctrl-C ends an answer."


class ChatHistory:
    """The messages so far, all of which are sent with every new one."""

    def __init__(self, client: Client, model: str, config: ChatConfig) -> None:
        self.client = client
        self.model = model
        self.config = config
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Remove all messages but the system prompt."""
        prompt = self.config.system_prompt
        self.messages = [{"role": "system", "content": prompt}] if prompt else []

    def say(self, message: str) -> None:
        """Send a message and print the answer as it arrives.

        An answer that the user interrupts (KeyboardInterrupt) stays in the conversation, incomplete.
        When the server fails (ClientError), the message and its answer are dropped.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        answer = self.client.chat(self.model, asked, terminal.sampling(self.config))
        try:
            terminal.write(answer, stats=self.config.stats)
        except KeyboardInterrupt:
            if answer.text:
                self.messages = [*asked, {"role": "assistant", "content": answer.text}]
            raise
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]


def run(config: ChatConfig, origins: Origins) -> int:
    """Send one message, or chat until the user exits. 1 when the server fails."""
    from penstock.client import Client, ClientError

    try:
        with Client(config.url, config.api_key, config.timeout) as client:
            message = None if config.quick is None else terminal.text_or_stdin(config.quick)
            conversation = ChatHistory(client, config.model or client.model(), config)
            if message is None:
                return _converse(conversation)
            conversation.say(message)
            return 0
    except ClientError as error:
        return terminal.report(error)


def _converse(conversation: ChatHistory) -> int:
    """Read lines from the user and print answers. Without a terminal, a failure or Ctrl-C ends it."""
    from penstock.client import ClientError

    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() a history and line editing
        print(GREETING.format(model=conversation.model, url=conversation.client.url))
    while True:
        try:
            message = _ask(interactive)
            if message in (None, "/exit"):
                return 0
            if message == "/clear":
                conversation.clear()
            elif message:
                conversation.say(message)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()  # ends the answer or the line; the conversation continues
        except ClientError as error:
            if not interactive:
                raise
            terminal.report(error)


def _ask(interactive: bool) -> str | None:
    """The user's next line; None at the end of input. Raises ConfigError when it is not UTF-8."""
    try:
        line = input("> " if interactive else "").strip()
        line.encode()
    except EOFError:
        if interactive:
            print()
        return None
    except UnicodeError:
        raise ConfigError("standard input is not UTF-8") from None
    return line


COMMAND = Command(
    ("chat",), "Chat with a served model: one message with -q, else until /exit.", ChatConfig, run
)
