"""Options of ``penstock complete`` and ``penstock chat``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.config.describe import ALLOWED_KEY, Key, option

ALLOWED_URL = "http://HOST:PORT or https://HOST:PORT, with or without /v1"


def short(letter: str) -> Meta:
    """Adds a one-letter flag, such as ``-q``, to an option."""
    return Meta(extra={"short": f"-{letter}"})


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of both commands: server, model and sampling parameters."""

    url: Annotated[
        str,
        option(
            "URL of the server, with or without /v1. Certificates: SSL_CERT_FILE names those to trust.",
            "Server",
            pattern=r"^https?://[^/]+",
            allowed=ALLOWED_URL,
        ),
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None, option("Model name. Default: the first that the server lists.", "Server")
    ] = None
    api_key: Annotated[
        Key | None,
        option("API key, sent as a bearer token.", "Server", secret=True, allowed=ALLOWED_KEY),
    ] = None
    timeout: Annotated[
        float, option("Maximum time without data from the server, in seconds.", "Server", gt=0)
    ] = 600.0

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


class CompleteConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class ChatConfig(ClientConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
