"""Options of the ``penstock bench`` commands, and of ``penstock size``."""

from __future__ import annotations

import shlex
from dataclasses import field
from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import ALLOWED_KEY, Key, option, option_group
from penstock.config.gateway_options.picking import DEFAULT_SCORERS, Scorers
from penstock.config.options.synthetic import MAX_TOKENS_PER_STEP, STEP_MS, TOKENS_PER_STEP
from penstock.config.rules.bench_rules import (
    CONNECTION_RULES,
    ENGINE_RULES,
    HOST_RULES,
    SPECULATION_RULES,
)
from penstock.config.rules.rule import check

# -- of several commands

Tokens = Annotated[int, option("Output tokens per request.", "Load", ge=1)]
Endpoint = Annotated[
    Literal["completions", "chat", "responses", "messages"], option("API to call, with streaming.", "Load")
]
Rounds = Annotated[int, option("Number of measured rounds.", "Load", ge=1, le=1000)]
Timeout = Annotated[float, option("Maximum duration of the whole command, in seconds.", "Load", gt=0)]
ServerArgs = Annotated[
    str | None,
    option("Additional options of penstock serve, such as --server-args='--log-level debug'.", "Server"),
]
Http2 = Annotated[
    bool,
    option(
        "Load over HTTP/2, by prior knowledge or, with TLS, by ALPN. The streams share --connections.", "Load"
    ),
]
Connections = Annotated[
    Annotated[int, Meta(ge=1, le=65536)] | None,
    option("With --http2: number of connections. Default: 4. HTTP/1.1 takes one per stream.", "Load"),
]
CompareWith = Annotated[
    str | None,
    option(
        "Options of a second measurement, made by turns with this one and compared: "
        "--compare-with=--no-http2 for the same load over HTTP/1.1. Other options stay as they are.",
        "Load",
        metavar="OPTIONS",
    ),
]
CompareEngineWith = Annotated[
    str | None,
    option(
        "Options of a second measurement, made by turns with this one and compared: "
        "--compare-with=--logprobs=0 for the same steps with logprobs.",
        "Load",
        metavar="OPTIONS",
    ),
]
Report = Annotated[str | None, option("File for the report, as JSON.", "Report", metavar="FILE")]


@option_group
class BenchHostConfig:
    """Options of ``penstock bench host``."""

    # -- load
    streams: Annotated[
        int,
        option(
            "Concurrent streams. Their connections are kept open and reused in all rounds.",
            "Load",
            ge=1,
            le=65536,
        ),
    ] = 1024
    http2: Http2 = False
    connections: Connections = None
    tokens: Tokens = 128
    prompt_tokens: Annotated[int, option("Prompt length, in tokens.", "Load", ge=1)] = 32
    prompt_kind: Annotated[
        Literal["text", "ids"],
        option(
            "Kind of prompts. text: about --prompt-tokens long, tokenized by the server; ids: lists "
            "of exactly that many token ids.",
            "Load",
        ),
    ] = "text"
    endpoint: Endpoint = "completions"
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        option(
            "Ask for the logprobs of output tokens, with that many alternatives. Default: for none.", "Load"
        ),
    ] = None
    requests: Annotated[
        Annotated[int, Meta(ge=1)] | None, option("Requests per round. Default: one per stream.", "Load")
    ] = None
    concurrency: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option("Maximum requests in flight. Default: --streams, which is also the maximum.", "Load"),
    ] = None
    slow_readers: Annotated[
        int,
        option(
            "Number of streams, out of --streams, that hardly read. Latencies of the others are "
            "compared to rounds without slow readers. With --http2 half of them share a connection that is "
            "not read, half have windows of 1 byte.",
            "Load",
            ge=0,
        ),
    ] = 0
    rounds: Rounds = 3
    compare_with: CompareWith = None
    timeout: Timeout = 300.0

    # -- server started for the run
    step_ms: Annotated[float, option(STEP_MS, "Server", ge=0)] = 15.0
    tokens_per_step: Annotated[int, option(TOKENS_PER_STEP, "Server", ge=1, le=MAX_TOKENS_PER_STEP)] = 1
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        option("Tokens per event, or auto, as for penstock serve.", "Server"),
    ] = 1
    api_server_count: Annotated[
        list[Annotated[int, Meta(ge=1, le=1024)]],
        option(
            "Number of API server processes. Several numbers are measured by turns and compared: 1,2,4.",
            "Server",
        ),
    ] = field(default_factory=lambda: [1])
    grow_load: Annotated[
        bool,
        option(
            "With several --api-server-count: --streams per API server, not in total.",
            "Server",
        ),
    ] = False
    engines: Annotated[int, option("Number of engine processes.", "Server", ge=1, le=1024)] = 1
    attach: Annotated[
        bool,
        option(
            "Attach engines that speak vLLM's wire and make tokens on a clock. The CPU time is then that of "
            "all processes of the server.",
            "Server",
        ),
    ] = False
    tls: Annotated[
        bool,
        option(
            "Serve over TLS, with a certificate made for the run. Needs the package trustme.",
            "Server",
        ),
    ] = False
    server_args: ServerArgs = None

    # -- server that runs already
    url: Annotated[
        Annotated[str, Meta(pattern=r"^http://[^/]+")] | None,
        option(
            "URL of a running server to measure, with or without /v1; needs --pid.",
            "Running server",
            allowed="http://HOST:PORT, with or without /v1",
        ),
    ] = None
    pid: Annotated[
        list[Annotated[int, Meta(ge=1)]] | None,
        option(
            "Processes whose CPU time is measured; Penstock's supervisor stands for its API servers.",
            "Running server",
        ),
    ] = None
    api_key: Annotated[
        Key | None,
        option("API key, sent as a bearer token.", "Running server", secret=True, allowed=ALLOWED_KEY),
    ] = None

    # -- report
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for options that contradict each other."""
        check(self, HOST_RULES)
        check(self, CONNECTION_RULES)
        check_arguments("--server-args", self.server_args)

    @property
    def measured_streams(self) -> int:
        """Streams of the load client, without the slow readers."""
        return self.streams - self.slow_readers

    @property
    def load_connections(self) -> int:
        """Connections of the load client, without those of the slow readers."""
        return (
            http2_connections(self.connections, self.measured_streams)
            if self.http2
            else self.measured_streams
        )

    @property
    def requests_per_round(self) -> int:
        """Requests of one round."""
        return self.requests or self.measured_streams

    @property
    def in_flight(self) -> int:
        """Requests in flight at a time."""
        return self.concurrency or self.measured_streams


@option_group
class BenchEngineConfig:
    """Options of ``penstock bench engine``."""

    rows: Annotated[
        list[Annotated[int, Meta(ge=1, le=65536)]],
        option("Streams that decode in every step; several values are measured one after the other.", "Load"),
    ] = field(default_factory=lambda: [1024])
    steps: Annotated[int, option("Number of measured steps.", "Load", ge=1, le=1_000_000)] = 1000
    sequence_length: Annotated[
        list[Annotated[int, Meta(ge=1, le=1 << 20)]],
        option("Prompt length, in tokens; several values are measured one after the other.", "Load"),
    ] = field(default_factory=lambda: [128])
    accept: Annotated[
        int,
        option(
            "Draft tokens that every step accepts for every stream (--speculative-method ngram): rows have "
            "one token more.",
            "Load",
            ge=0,
            le=32,
        ),
    ] = 0
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_BENCH_LOGPROBS)] | None,
        option(
            "Logprobs that every stream asks for, beside those of its own tokens: 0 for these alone. "
            "Default: none.",
            "Load",
        ),
    ] = None
    stream_interval: Annotated[
        int, option("Tokens per row; streams take turns in having one.", "Load", ge=1, le=16)
    ] = 1
    api_server_count: Annotated[
        int, option("API servers that the streams belong to, each of which gets frames.", "Load", ge=1, le=64)
    ] = 1
    rounds: Annotated[
        int, option("With --compare-with: rounds of --steps, by turns.", "Load", ge=1, le=1000)
    ] = 5
    compare_with: CompareEngineWith = None
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for options that contradict each other, and when the prompts need too much
        memory."""
        check(self, ENGINE_RULES)
        tokens = max(self.rows) * max(self.sequence_length)
        if tokens > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"--rows, --sequence-length: {tokens:,} tokens of prompts, at most {MAX_PROMPT_TOKENS:,}"
            )


MAX_BENCH_LOGPROBS = 1024
"""Maximum ``--logprobs`` of ``penstock bench engine``: as many as a frame's entries have."""
MAX_PROMPT_TOKENS = 1 << 28
"""Maximum prompt tokens of ``penstock bench engine``: two processes hold them, 4 bytes per token."""


@option_group
class BenchAdaptersConfig:
    """Options of ``penstock bench adapters``."""

    model: Annotated[
        str | None,
        option(
            "Directory of a model, whose weights are drawn at random. Default: a Llama of 2 layers with a "
            "hidden size of 64.",
            "Load",
            metavar="DIR",
        ),
    ] = None
    adapters: Annotated[int, option("Adapters of the streams.", "Load", ge=1, le=1024)] = 16
    rows: Annotated[int, option("Streams that decode in every step.", "Load", ge=1, le=4096)] = 64
    ranks: Annotated[
        list[Annotated[int, Meta(ge=1, le=1024)]],
        option("Ranks of the adapters; several values are measured one after the other.", "Load"),
    ] = field(default_factory=lambda: [8, 16, 64])
    steps: Annotated[int, option("Steps of each turn.", "Load", ge=1, le=10_000)] = 100
    rounds: Annotated[
        int, option("Turns without adapters and with them, by turns.", "Load", ge=1, le=1000)
    ] = 5
    threads: Annotated[int, option("Threads of the model on a CPU.", "Load", ge=1, le=1024)] = 1
    json: Report = None


@option_group
class BenchSpeculationConfig:
    """Options of ``penstock bench speculation``."""

    model: Annotated[
        str | None,
        option("Directory of a model. Default: the bundled demo model.", "Load", metavar="DIR"),
    ] = None
    method: Annotated[
        Literal["ngram", "suffix", "draft"],
        option("See --speculative-method of penstock serve.", "Load"),
    ] = "ngram"
    speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=32)] | Literal["auto"],
        option("See --speculative-tokens of penstock serve.", "Load"),
    ] = "auto"
    draft_model: Annotated[
        str | None, option("Directory of the draft model of --method draft.", "Load", metavar="DIR")
    ] = None
    workloads: Annotated[
        list[Literal["repeat", "schema", "document", "random"]],
        option(
            "Workloads, one after the other. repeat: a question is asked again, and the prompt has its "
            "answer; schema: a list by a JSON schema; document: the beginning of a text; random: text "
            "without repetition.",
            "Load",
        ),
    ] = field(default_factory=lambda: ["repeat", "schema", "document", "random"])
    streams: Annotated[
        list[Annotated[int, Meta(ge=1, le=4096)]],
        option("Streams at the same time; several values are measured one after the other.", "Load"),
    ] = field(default_factory=lambda: [1, 8, 64])
    tokens: Annotated[int, option("Output tokens of each stream.", "Load", ge=2, le=10_000)] = 200
    rounds: Annotated[int, option("Turns without and with speculation, by turns.", "Load", ge=1, le=1000)] = 5
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], option("Data type of the model.", "Load")
    ] = "auto"
    threads: Annotated[int, option("Threads of the model on a CPU.", "Load", ge=1, le=1024)] = 1
    json: Report = None

    def __post_init__(self) -> None:
        """Raise ValueError for a draft model without its method, or the method without one."""
        check(self, SPECULATION_RULES)


@option_group
class BenchColumnsConfig:
    """Options of ``penstock bench columns``."""

    choices: Annotated[int, option("Choices of the reply.", "Load", ge=1, le=1024)] = 64
    tokens: Annotated[int, option("Tokens of each choice.", "Load", ge=1, le=1 << 17)] = 4096
    logprobs: Annotated[int, option("Alternatives per token.", "Load", ge=0, le=20)] = 0
    rounds: Rounds = 3
    timeout: Timeout = 300.0
    server_args: ServerArgs = None
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that a shell cannot parse."""
        check_arguments("--server-args", self.server_args)


@option_group
class BenchEmbedConfig:
    """Options of ``penstock bench embed``."""

    inputs: Annotated[int, option("Inputs of a request.", "Load", ge=1, le=1 << 16)] = 1
    tokens: Annotated[int, option("Tokens of an input, about.", "Load", ge=1, le=4096)] = 20
    formats: Annotated[
        list[Literal["float", "base64", "binary"]],
        option("Formats of the replies, which are asked for by turns.", "Load"),
    ] = field(default_factory=lambda: ["float", "base64", "binary"])
    concurrency: Annotated[int, option("Requests at the same time.", "Load", ge=2, le=4096)] = 32
    requests: Annotated[int, option("Requests of a round.", "Load", ge=1, le=1 << 24)] = 2000
    rounds: Rounds = 3
    beside: Annotated[
        int,
        option(
            "Also measure how much requests of so many inputs, one after the other, delay the replies to "
            "others, of which 200 are sent per second. Default: none.",
            "Load",
            ge=0,
            le=1 << 16,
        ),
    ] = 0
    compare_url: Annotated[
        str | None,
        option("Another server with /v1/embeddings, measured by turns with this one.", "Load", metavar="URL"),
    ] = None
    compare_pid: Annotated[
        list[Annotated[int, Meta(ge=1)]] | None,
        option("Process ids of its API servers, whose CPU time counts.", "Load", metavar="PID"),
    ] = None
    timeout: Timeout = 300.0
    model: Annotated[
        str | None,
        option("Model whose tokenizer is used. Default: the demo model's.", "Server", metavar="MODEL"),
    ] = None
    dimensions: Annotated[int, option("Values of a vector.", "Server", ge=1, le=1 << 16)] = 1024
    step_ms: Annotated[float, option(STEP_MS, "Server", ge=0)] = 0.0
    server_args: ServerArgs = None
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that a shell cannot parse, or options that need others."""
        check_arguments("--server-args", self.server_args)
        if (self.compare_url is None) != (self.compare_pid is None):
            raise ValueError("--compare-url and --compare-pid need each other")


@option_group
class BenchImagesConfig:
    """Options of ``penstock bench images``."""

    measure: Annotated[
        list[Literal["repeated", "beside", "scaling", "killed"]],
        option(
            "What to measure. repeated: one picture sent again and again; beside: what pictures do to text "
            "streams; scaling: two media workers beside one; killed: kill -9 under load.",
            "Load",
        ),
    ] = field(default_factory=lambda: ["repeated", "beside", "scaling"])
    megapixels: Annotated[float, option("Size of a picture.", "Load", gt=0, le=100)] = 4.0
    requests: Annotated[
        int, option("Requests with the one picture; of scaling a tenth.", "Load", ge=4, le=1 << 20)
    ] = 1000
    streams: Annotated[int, option("Text streams beside pictures.", "Load", ge=1, le=65536)] = 128
    kills: Annotated[int, option("Processes to kill.", "Load", ge=1, le=1 << 16)] = 200
    rounds: Rounds = 3
    timeout: Timeout = 900.0
    api_server_count: Annotated[int, option("API servers of the one picture.", "Server", ge=1, le=1024)] = 3
    engines: Annotated[int, option("Their engines.", "Server", ge=1, le=1024)] = 2
    media_workers: Annotated[int, option("Media workers.", "Server", ge=1, le=64)] = 1
    image_tokens: Annotated[int, option("Maximum tokens of a picture.", "Server", ge=1, le=65536)] = 1024
    server_args: ServerArgs = None
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that a shell cannot parse."""
        check_arguments("--server-args", self.server_args)


@option_group
class BenchStartConfig:
    """Options of ``penstock bench start``."""

    rounds: Rounds = 5
    api_server_count: Annotated[int, option("Number of API server processes.", "Server", ge=1, le=1024)] = 1
    engines: Annotated[int, option("Number of engine processes.", "Server", ge=1, le=1024)] = 1
    compare_tree: Annotated[
        str | None,
        option(
            "Working tree of another version, whose server is started by turns with this one's.",
            "Server",
            metavar="DIR",
        ),
    ] = None
    timeout: Timeout = 300.0
    server_args: ServerArgs = None
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that a shell cannot parse."""
        check_arguments("--server-args", self.server_args)


@option_group
class BenchSessionConfig:
    """Options of ``penstock bench session``."""

    history_tokens: Annotated[
        int, option("Tokens of the conversation before the turns, about.", "Load", ge=100, le=1 << 20)
    ] = 100_000
    history_turns: Annotated[
        int, option("Tool calls with results in that conversation.", "Load", ge=1, le=10_000)
    ] = 50
    new_tokens: Annotated[int, option("Tokens that a turn adds, about.", "Load", ge=1, le=1 << 16)] = 200
    sessions: Annotated[int, option("Conversations at the same time.", "Load", ge=1, le=256)] = 8
    turns: Annotated[int, option("Measured turns of each.", "Load", ge=1, le=1000)] = 10
    websocket: Annotated[
        bool,
        option(
            "Responses over WebSocket, each continuing the one before, in place of chat completions: a turn "
            "sends only its new items.",
            "Load",
        ),
    ] = False
    timeout: Timeout = 300.0
    server_args: ServerArgs = None
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that a shell cannot parse."""
        check_arguments("--server-args", self.server_args)


@option_group
class BenchGatewayConfig:
    """Options of ``penstock bench gateway``."""

    streams: Annotated[int, option("Concurrent streams.", "Load", ge=1, le=65536)] = 256
    http2: Http2 = False
    connections: Connections = None
    tokens: Tokens = 128
    endpoint: Endpoint = "completions"
    rounds: Rounds = 3
    step_ms: Annotated[
        float, option("Step duration of the model servers, in milliseconds.", "Load", ge=0)
    ] = 20.0
    servers: Annotated[int, option("Number of model servers behind the gateway.", "Servers", ge=1, le=16)] = 1
    gateway_args: Annotated[
        str | None,
        option(
            "Additional options of penstock gateway, such as --gateway-args='--include-usage off'.", "Servers"
        ),
    ] = None
    compare_with: CompareWith = None
    timeout: Timeout = 300.0
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for options that contradict each other."""
        check(self, CONNECTION_RULES)
        check_arguments("--gateway-args", self.gateway_args)

    @property
    def measured_streams(self) -> int:
        """Streams of the load client."""
        return self.streams


@option_group
class BenchRoutingConfig:
    """Options of ``penstock bench routing``."""

    servers: Annotated[int, option("Number of simulated servers.", "Simulation", ge=2, le=1024)] = 16
    traces: Annotated[
        list[Literal["chat", "agents", "documents"]],
        option(
            "Traces: chats; coding agents, whose histories grow with every tool call; questions about one of "
            "40 documents.",
            "Simulation",
        ),
    ] = field(default_factory=lambda: ["chat", "agents", "documents"])
    load: Annotated[
        float,
        option("Rate of new conversations, as a multiple of the trace's own.", "Simulation", gt=0, le=100),
    ] = 1.0
    duration: Annotated[
        float,
        option("Simulated seconds in which conversations begin.", "Simulation", gt=0, le=3600),
    ] = 90.0
    seed: Annotated[int, option("Seed of traces and choices.", "Simulation", ge=0)] = 1
    scorers: Scorers = DEFAULT_SCORERS
    timeout: Timeout = 600.0
    json: Report = None


DEFAULT_CONNECTIONS = 4


def http2_connections(given: int | None, streams: int) -> int:
    """Connections that share ``streams``."""
    return given or min(DEFAULT_CONNECTIONS, streams)


def check_arguments(flag: str, text: str | None) -> None:
    """Raises ValueError for further arguments that a shell cannot parse."""
    try:
        shlex.split(text or "")
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


OF_STARTED_SERVER = (
    "step_ms",
    "tokens_per_step",
    "stream_interval",
    "api_server_count",
    "engines",
    "tls",
    "server_args",
    "slow_readers",
)
"""Fields of a server that the command starts; they have no effect with ``--url``."""


@option_group
class SizeConfig:
    """Options of ``penstock size``."""

    streams: Annotated[int, option("Streams that run at the same time.", "Load", ge=1, le=10_000_000)] = 1000
    tokens_per_second: Annotated[
        float, option("Tokens per second that each stream gets.", "Load", gt=0, le=10_000)
    ] = 30.0
    output_tokens: Annotated[int, option("Tokens of a reply.", "Load", ge=1, le=1_000_000)] = 500
    prompt_tokens: Annotated[int, option("Tokens of a prompt.", "Load", ge=1, le=100_000)] = 500
    stream_interval: Annotated[
        int, option("Tokens per event, as of penstock serve.", "Load", ge=1, le=1024)
    ] = 1
    endpoint: Endpoint = "chat"
    http2: Annotated[bool, option("Clients, or the gateway before the server, speak HTTP/2.", "Load")] = False
    gateway: Annotated[bool, option("A gateway stands before the servers.", "Load")] = False
    engine_streams: Annotated[
        int, option("Streams of one engine, as --max-num-seqs.", "Machine", ge=1, le=65536)
    ] = 256
    engine_tokens_per_second: Annotated[
        Annotated[float, Meta(ge=0.001, le=1e9)] | None,
        option(
            "Tokens per second of one engine. Default: what --engine-streams of this load need.", "Machine"
        ),
    ] = None
    cpu_us_per_token: Annotated[
        Annotated[float, Meta(ge=0.001, le=1e9)] | None,
        option(
            "Microseconds of an API server per token, as penstock status --pid tells them of a server that "
            "runs. Default: they are measured here, which takes a minute.",
            "Machine",
        ),
    ] = None
    load: Annotated[
        float, option("Share of a core that API servers and workers may take.", "Machine", gt=0, le=0.95)
    ] = 0.5
    json: Annotated[bool, option("Print one JSON object instead of a table.", "Output")] = False
