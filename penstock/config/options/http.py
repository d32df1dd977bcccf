"""Options of the HTTP server of API servers."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group


@option_group
class HttpOptions:
    """Options of the HTTP server of API servers."""

    uds: Annotated[
        str | None,
        option("Path of a unix socket to listen on instead of a TCP port.", "HTTP server"),
    ] = None
    uds_mode: Annotated[
        str,
        option(
            "Permissions of the unix socket, octal. The default allows owner and group to connect.",
            "HTTP server",
            pattern=r"^0?[0-7]{3}\Z",
            allowed="three octal digits",
        ),
    ] = "660"
    root_path: Annotated[
        str,
        option(
            "URL path prefix under which a proxy exposes the server. Requests with and without it "
            "are served.",
            "HTTP server",
            pattern=r"^((/[^/?#%\s]+)+|)\Z",
            allowed="a path such as /llm, without / at its end",
        ),
    ] = ""
    shared_prefix_cache: Annotated[
        bool,
        option(
            "Share cached prefixes between API keys. Default: between requests with the same key only, so "
            "that neither cached_tokens nor drafts tell what others have sent or were answered.",
            "HTTP server",
        ),
    ] = False
    api_server_count: Annotated[
        int, option("Number of API server processes.", "HTTP server", ge=1, le=1024)
    ] = 1
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option(
            "Requests to log when they finish. errors: those refused or not completed; all: also the others, "
            "but for probes (/health, /ready, /ping), /metrics and /status.",
            "HTTP server",
        ),
    ] = "none"
    enable_request_id_headers: Annotated[
        bool, option("Add X-Request-Id to responses: the client's value, or a generated one.", "HTTP server")
    ] = False
    web_page: Annotated[
        bool,
        option("Serve a web page with chat, API reference and live status at / and /docs.", "HTTP server"),
    ] = True
    strict_requests: Annotated[
        bool,
        option(
            "Reject requests with unknown fields instead of ignoring these fields, and with images and other "
            "content that the model cannot see instead of telling the model.",
            "HTTP server",
        ),
    ] = False
    strict_schema: Annotated[
        bool,
        option(
            "Leave null fields out of whole replies of completions and chats, but for those that OpenAI's "
            "schemas require, and require model in completions, chats, responses and messages.",
            "HTTP server",
        ),
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        option(
            "Send usage with every event and at the end of every stream, whatever its stream_options say. "
            "This costs CPU for every event.",
            "HTTP server",
        ),
    ] = False
    enable_per_request_metrics: Annotated[
        bool,
        option(
            "Tell in each reply of one choice how long the request waited and how fast its tokens came, as "
            "metrics. Streams have them with their usage.",
            "HTTP server",
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        option(
            "Serve /tokenizer_info: the tokenizer's configuration, with the chat template.", "HTTP server"
        ),
    ] = False
    max_logprobs: Annotated[
        int,
        option(
            "Maximum logprobs per token that a request may ask for; -1: the whole vocabulary.",
            "HTTP server",
            ge=-1,
        ),
    ] = 20
