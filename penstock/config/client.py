"""Options of ``penstock complete`` and ``penstock chat``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option, option_group
from penstock.config.options.connection import ConnectionOptions


def short(letter: str) -> Meta:
    """Add a one-letter flag, such as ``-q``, to an option."""
    return Meta(extra={"short": f"-{letter}"})


@option_group
class ClientConfig(ConnectionOptions):
    """Options of both commands: model, sampling parameters and what is printed."""

    model: Annotated[
        str | None, option("Model name. Default: the first that the server lists.", "Server")
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option("Maximum output tokens. Default: the server's.", "Sampling"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        option("Sampling temperature; 0: greedy. Default: the server's.", "Sampling"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        option(
            "Nucleus sampling: cumulative probability of the tokens to sample from. Default: the server's.",
            "Sampling",
        ),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option("Seed for reproducible sampling. Default: random.", "Sampling"),
    ] = None

    stats: Annotated[
        bool,
        option("Print time to first token, token counts and tokens per second to standard error.", "Output"),
    ] = False


@option_group
class CompleteConfig(ClientConfig):
    """Options of ``penstock complete``."""

    prompt: Annotated[
        str | None,
        option(
            "Text to continue; -: read from standard input, without its last line break.",
            "Prompt",
            positional=True,
        ),
    ] = None
    max_tokens: Annotated[int, option("Maximum output tokens.", "Sampling", ge=1)] = 128


@option_group
class ChatConfig(ClientConfig):
    """Options of ``penstock chat``."""

    quick: Annotated[
        str | None,
        option(
            "Send one message, print the answer and exit; -: read the message from standard input.",
            "Conversation",
            metavar="MESSAGE",
        ),
        short("q"),
    ] = None
    system_prompt: Annotated[str | None, option("System message of the conversation.", "Conversation")] = None
