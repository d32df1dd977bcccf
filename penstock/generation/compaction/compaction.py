"""How conversations are compacted: the prompt for their summary, and what stands in their place."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.generation.compaction.seal import MIN_KEY_BYTES, Seals
from penstock.generation.compaction.shortening import length, shortened
from penstock.generation.input_processor import InputProcessor
from penstock.generation.prompt.template_rules import SYSTEM_ROLES
from penstock.generation.request.schemas import Message
from penstock.http.errors import ApiError

MAX_PROMPT_BYTES = 64 << 10
"""Size of a --compaction-prompt-file: it precedes every summary."""
MAX_SUMMARY_TOKENS = 16_384
"""Most tokens of a summary, the model's reasoning before it included."""
SUMMARY_SHARE = 4
"""A summary has at most this part of the context, as have the user's own messages that are kept beside it."""
PROMPT = """\
The conversation above is about to be replaced by a summary of it, which you write now. Whoever goes on \
with the work, you or another assistant, will read the summary in its place. Do not call tools, do not \
answer the user, and do not go on with the work. Write the summary alone, under these headings:

1. Goal: what the user asked for, with every requirement, limit and preference, in the user's words where \
they matter.
2. Decisions: what was decided and why, and what was tried and did not work, so that nobody tries it \
again.
3. Files and state: every file, function, command, address, identifier and value that matters, by its \
exact name; what was changed, and what the state is now.
4. Results: what tools returned that is still needed, quoted where the exact text matters; errors that are \
not solved.
5. Next steps: what was being done last, and what is left to do, in order.

Be complete and exact rather than short: what the summary does not say is lost."""
"""The request for a summary, unless --compaction-prompt-file has another."""
_OPENING = (
    "The assistant wrote this summary of the conversation until here, which it replaces. Go on from it.\n\n"
)
CUT = "\n\n[The summary ends here: it has reached its limit.]"
NO_SUMMARY = (
    "The model wrote no summary: its output had no text besides reasoning and calls of tools. Try again."
)


def no_summary() -> ApiError:
    """The error of a compaction whose summary is empty."""
    return ApiError(500, NO_SUMMARY, code="compaction_failed")


class Compaction:
    """The way of one server."""

    def __init__(self, key: bytes = b"", prompt: str = PROMPT) -> None:
        """``key``: for seals; empty: one that no other process has."""
        self.seals = Seals(key or secrets.token_bytes(MIN_KEY_BYTES))
        self.prompt = prompt

    @classmethod
    def of_server(cls, config: ServeConfig, key: bytes) -> Compaction:
        """As the options want it. Raises ConfigError."""
        file = config.compaction_prompt_file
        return cls(key) if file is None else cls(key, read_prompt(file))

    def summary_prompt(
        self,
        processor: InputProcessor,
        messages: Sequence[Message],
        render: Callable[[list[Message]], str],
        instructions: str | None = None,
    ) -> str:
        """The prompt for a summary of ``messages``: as ``render`` gives the conversation, so that its
        beginning is in the prefix cache, and the request for a summary. Where that leaves no room in the
        context, the oldest results of tools are left out, and then the oldest messages.

        ``instructions``: in place of the server's request. Raises ApiError.
        """
        asked = [*messages, Message("user", instructions or self.prompt)]
        return shortened(asked, render, processor.count_tokens, processor.max_total - room(processor))


def room(processor: InputProcessor) -> int:
    """Tokens that the context keeps free for a summary."""
    return max(1, min(MAX_SUMMARY_TOKENS, processor.max_total // SUMMARY_SHARE))


class KeptRoom(NamedTuple):
    """What the user's own messages that are kept beside a summary may have."""

    characters: int
    of_picture: int = 0
    """As how many characters a picture counts."""


def kept_room(processor: InputProcessor) -> KeptRoom:
    """A part of the context: a token has about four characters."""
    return KeptRoom(4 * processor.max_total // SUMMARY_SHARE, 4 * processor.model_info.picture_tokens())


def summary_message(text: str) -> Message:
    """What the model reads in place of what was summarized."""
    return Message("user", _OPENING + text)


def kept(messages: Sequence[Message], room: KeptRoom) -> list[Message]:
    """The messages that stay beside the summary of a conversation: instructions, and of the user's own the
    latest that fit the room."""
    lengths = [length(each, room.of_picture) if each.role == "user" else None for each in messages]
    stay = newest(lengths, room.characters)
    return [
        message
        for message, stays in zip(messages, stay, strict=True)
        if stays or message.role in SYSTEM_ROLES
    ]


def newest(lengths: Sequence[int | None], most: int) -> list[bool]:
    """Which of some texts are the newest with ``most`` characters together; None: this is none of them."""
    stay = [False] * len(lengths)
    for place in range(len(lengths) - 1, -1, -1):
        characters = lengths[place]
        if characters is None:
            continue
        most -= characters
        if most < 0:
            break
        stay[place] = True
    return stay


def read_prompt(file: str) -> str:
    """The text of a --compaction-prompt-file. Raises ConfigError."""
    try:
        data = Path(file).expanduser().read_bytes()
        text = data.decode().strip()
        if not text or len(data) > MAX_PROMPT_BYTES:
            raise ValueError(f"must have 1 to {MAX_PROMPT_BYTES} bytes of text, has {len(data)}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"--compaction-prompt-file {file}: {reason}") from None
    return text
