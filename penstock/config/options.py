"""Every option of ``penstock serve``, once: its type, bounds, default and description.

Command line, YAML file, environment and the documentation table are derived from these fields by
:mod:`penstock.config.sources`; nothing else may state a name, a default or a bound again.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


def option(description: str, group: str, **meta: Any) -> Meta:
    """The metadata of one option. ``group`` is its heading in ``--help`` and in the documentation.

    ``meta`` takes msgspec bounds (``ge``, ``le``, ``min_length`` …); the keyword ``metavar`` names the
    value in ``--help``; ``secret=True`` keeps the value out of logs and banners; ``rest=True`` gives it what
    follows ``--`` on the command line.
    """
    extra = {"group": group}
    extra |= {key: meta.pop(key) for key in ("metavar", "secret", "positional", "rest") if key in meta}
    return Meta(description=description, extra=extra, **meta)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``penstock serve`` runs with. Children receive it whole, as JSON."""

    # -- model
    model: Annotated[
        str | None,
        option(
            "Model directory or Hugging Face hub id; the bundled demo model when absent.",
            "Model",
            positional=True,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        option("Names clients may use for the model, the first one is reported; default: MODEL.", "Model"),
    ] = None
    revision: Annotated[str | None, option("Branch, tag or commit of a hub id.", "Model")] = None
    tokenizer: Annotated[
        str | None, option("Directory with tokenizer.json, when it is not the model's.", "Model")
    ] = None
    chat_template: Annotated[
        str | None,
        option("File with a Jinja chat template that replaces the model's.", "Model", metavar="FILE"),
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "none"],
        option("How the model writes tool calls; auto: what its chat template shows.", "Model"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        option(
            "How the model marks its reasoning, which replies carry apart from the content; think: <think> "
            "and </think>; auto: what its chat template shows.",
            "Model",
        ),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        option("auto: sampling defaults from the model's generation_config.json; none: OpenAI's.", "Model"),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        option("Longest prompt plus output, in tokens; default: what the model allows.", "Model"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Type of weights and KV cache; auto: the model's on a GPU, float32 on a CPU.", "Model"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        option(
            "auto: safetensors, or PyTorch's .bin where a directory has no other; safetensors: only these; "
            "dummy: random weights, made from config.json alone.",
            "Model",
        ),
    ] = "auto"
    seed: Annotated[
        int, option("Seed of what is not seeded by a request (weights of a dummy model).", "Model", ge=0)
    ] = 0

    # -- HTTP server
    host: Annotated[str, option("Address to listen on.", "HTTP server")] = "127.0.0.1"
    port: Annotated[
        int, option("Port to listen on; 0 takes a free one and prints it.", "HTTP server", ge=0, le=65535)
    ] = 8000
    uds: Annotated[
        str | None,
        option("Path of a unix socket to listen on, instead of a host and port.", "HTTP server"),
    ] = None
    uds_mode: Annotated[
        str,
        option(
            "Permissions of the unix socket, octal: who may connect. The default is owner and group.",
            "HTTP server",
            pattern=r"^0?[0-7]{3}$",
        ),
    ] = "660"
    root_path: Annotated[
        str,
        option(
            "Path under which a proxy offers the server. Routes answer with it and without it.",
            "HTTP server",
            pattern=r"^((/[^/?#%\s]+)+|)$",
        ),
    ] = ""
    api_key: Annotated[
        list[str] | None,
        option("Keys that clients must present as a bearer token.", "HTTP server", secret=True),
    ] = None
    api_key_file: Annotated[
        str | None,
        option("File with further keys, one per line; lines that start with # are comments.", "HTTP server"),
    ] = None
    api_server_count: Annotated[
        int, option("Number of API server processes.", "HTTP server", ge=1, le=1024)
    ] = 1
    max_request_bytes: Annotated[
        int, option("Largest request body accepted, in bytes.", "HTTP server", ge=1024)
    ] = 64 * 1024 * 1024
    max_header_bytes: Annotated[
        int,
        option("Largest request line and headers accepted, in bytes together.", "HTTP server", ge=1024),
    ] = 64 * 1024
    header_timeout: Annotated[
        float,
        option(
            "Seconds a client has to send its request, headers and body, before it is cut.",
            "HTTP server",
            gt=0,
        ),
    ] = 30.0
    keep_alive_timeout: Annotated[
        float, option("Seconds an idle connection is kept between requests.", "HTTP server", gt=0)
    ] = 75.0
    max_connections: Annotated[
        int, option("Connections one API server holds at most; further ones get 503.", "HTTP server", ge=1)
    ] = 65536
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option(
            "Requests to log at their end: none, all, or errors: those refused or not completed.",
            "HTTP server",
        ),
    ] = "none"
    enable_request_id_headers: Annotated[
        bool, option("Reply with X-Request-Id: the request's, or one made up for it.", "HTTP server")
    ] = False
    strict_requests: Annotated[
        bool, option("Refuse requests with unknown fields instead of ignoring them.", "HTTP server")
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        option("End every stream with its usage, also where stream_options does not ask.", "HTTP server"),
    ] = False
    max_logprobs: Annotated[
        int, option("Most alternatives a request may ask for per token.", "HTTP server", ge=0, le=20)
    ] = 20

    # -- pages of other origins
    allowed_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+)$")]] | None,
        option(
            "Origins whose pages may use the server, such as https://chat.example.com; * for every one. "
            "Default: none, a browser keeps others out.",
            "CORS",
        ),
    ] = None
    allowed_methods: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|[A-Z]+)$")]] | None,
        option("Methods that these pages may use; default: every one.", "CORS"),
    ] = None
    allowed_headers: Annotated[
        list[Annotated[str, Meta(pattern=r"^[!#-'*+.0-9A-Z^-z|~-]+$")]] | None,
        option("Headers that these pages may send; default: every one.", "CORS"),
    ] = None
    allow_credentials: Annotated[
        bool,
        option(
            "Let these pages use the cookies and certificates that a browser keeps for the server.", "CORS"
        ),
    ] = False

    # -- TLS
    ssl_certfile: Annotated[
        str | None,
        option("File with the certificate and its chain (PEM); turns TLS on.", "TLS", metavar="FILE"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        option(
            "File with the certificate's private key; default: the one of --ssl-certfile.",
            "TLS",
            metavar="FILE",
        ),
    ] = None
    enable_ssl_refresh: Annotated[
        bool, option("Use a new certificate when its files are replaced, without a restart.", "TLS")
    ] = False
    ssl_ca_certs: Annotated[
        str | None,
        option("File with the authorities whose client certificates are taken.", "TLS", metavar="FILE"),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        option(
            "Certificates of clients: 0 are not asked for, 1 are checked if presented, 2 are required.",
            "TLS",
            ge=0,
            le=2,
        ),
    ] = 0

    # -- streaming
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        option(
            "Tokens per event: a number, or auto for one event per token while the server keeps up. "
            "The first token is always sent at once.",
            "Streaming",
        ),
    ] = "auto"
    min_stream_interval: Annotated[
        int,
        option(
            "Fewest tokens per event that a request may ask for; finer wishes get this.",
            "Streaming",
            ge=1,
            le=1024,
        ),
    ] = 1
    stream_interval_ms: Annotated[
        Annotated[int, Meta(ge=1, le=60_000)] | None,
        option(
            "One event per so many milliseconds instead of per number of tokens; no token is held longer.",
            "Streaming",
        ),
    ] = None
    max_stream_backlog: Annotated[
        int,
        option("Bytes that may wait for a client that reads slowly before it is cut.", "Streaming", ge=4096),
    ] = 4 * 1024 * 1024
    sse_keep_alive: Annotated[
        float,
        option(
            "Seconds of silence after which a stream's client gets a comment line; 0: never.",
            "Streaming",
            ge=0,
        ),
    ] = 15.0
    compat_done_after_error: Annotated[
        bool,
        option(
            "Send [DONE] after an error event, as vLLM does; such a stream ends like a complete one.",
            "Streaming",
        ),
    ] = False

    # -- engine
    engine: Annotated[
        Literal["torch", "synthetic", "vllm"],
        option(
            "torch: the embedded engine; vllm: vLLM's engine; synthetic: tokens on a clock, no model.",
            "Engine",
        ),
    ] = "torch"
    engine_args: Annotated[
        list[str] | None,
        option(
            "Engine options of vLLM's own, written as for vllm serve, for --engine vllm. On the command line "
            "they follow --, behind everything else.",
            "Engine",
            rest=True,
        ),
    ] = None
    data_parallel_size: Annotated[
        int, option("Number of engine processes, on all hosts together.", "Engine", ge=1, le=1024)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "Split the experts of a mixture-of-experts model over the engines of --data-parallel-size, which "
            "then run in lock-step.",
            "Engine",
        ),
    ] = False
    dp_sync_interval: Annotated[
        int,
        option(
            "Steps that engines in lock-step make between two agreements on whether any has work.",
            "Engine",
            ge=1,
            le=1024,
        ),
    ] = 32
    max_num_seqs: Annotated[
        int, option("Streams an engine runs at the same time (its slots).", "Engine", ge=1, le=65536)
    ] = 1024
    max_num_batched_tokens: Annotated[
        int, option("Tokens an engine computes in one step, prefill and decode together.", "Engine", ge=1)
    ] = 2048
    max_prefill_delay: Annotated[
        float,
        option(
            "How many times as long as a step that only decodes a step with prompts may take, by estimate; "
            "0: no limit.",
            "Engine",
            ge=0,
        ),
    ] = 3.0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            "Which request runs first: fcfs, the one that came first; priority, the one with the lowest "
            "priority value, then the one that came first.",
            "Engine",
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Requests that may wait for a slot, in all engines together; further ones get 429. "
            "Default: no limit.",
            "Engine",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Prompt tokens of the requests that may wait for a slot, in all engines together; further "
            "requests get 429. Default: no limit.",
            "Engine",
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], option("Where the torch engine runs.", "Engine")] = (
        "auto"
    )
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        option(
            "Launch a step before the tokens of the step before it are read; auto: on a GPU, where the host "
            "then works while the device does.",
            "Engine",
        ),
    ] = "auto"
    block_size: Annotated[int, option("Tokens per KV cache block.", "Engine", ge=1, le=256)] = 16
    enable_prefix_caching: Annotated[
        bool,
        option(
            "Keep what was computed, for requests whose prompts begin alike: they share KV cache blocks.",
            "Engine",
        ),
    ] = True
    kv_cache_memory: Annotated[
        Annotated[int, Meta(ge=1 << 16)] | None,
        option("Bytes for the KV cache; default: a share of what is free on the device.", "Engine"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, option("Share of GPU memory to use for model and KV cache.", "Engine", gt=0, le=1)
    ] = 0.9
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option("CPU threads of the torch engine; default: the cores it may use.", "Engine"),
    ] = None

    # -- synthetic engine
    synthetic_step_ms: Annotated[
        float,
        option("Duration of one step of the synthetic engine, in milliseconds.", "Synthetic engine", ge=0),
    ] = 10.0
    synthetic_prefill_tokens_per_s: Annotated[
        float,
        option("Prompt tokens the synthetic engine takes per second; 0: no limit.", "Synthetic engine", ge=0),
    ] = 0.0
    synthetic_fault: Annotated[
        Annotated[str, Meta(pattern=r"^(error|exit|hang|stream-error)@[0-9]+$")] | None,
        option(
            "Fault to inject, KIND@STEP: error (an exception), exit (the process ends), hang, or "
            "stream-error (the oldest stream fails), at the given step of those with work, counted from 0.",
            "Synthetic engine",
        ),
    ] = None

    # -- several hosts
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        option("How many of them this host runs; default: all from its first one on.", "Hosts"),
    ] = None
    data_parallel_start_rank: Annotated[
        int, option("Rank of the first engine of a --headless host.", "Hosts", ge=0, lt=1024)
    ] = 0
    headless: Annotated[
        bool, option("Run engines only, for the API servers of the host that --coordinator names.", "Hosts")
    ] = False
    coordinator: Annotated[
        Annotated[str, Meta(pattern=r"^tcp://([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}$")] | None,
        option(
            "Address of the fleet's coordinator, tcp://HOST:PORT: where this host listens for engines of "
            "others or, with --headless, where its engines join the fleet.",
            "Hosts",
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        option(
            "File that penstock keys has made, the same on every host of the fleet.", "Hosts", metavar="FILE"
        ),
    ] = None
    engine_host: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/\[\]]+$")] | None,
        option(
            "Address of this --headless host at which its engines listen for API servers; default: the one "
            "it reaches the coordinator by.",
            "Hosts",
        ),
    ] = None

    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        option(
            "Where engines run: mp, as processes of this host; ray, on machines of a Ray cluster.", "Hosts"
        ),
    ] = "mp"
    ray_address: Annotated[
        str,
        option(
            "The Ray cluster, HOST:PORT; auto: the one that this host belongs to.",
            "Hosts",
            pattern=r"^(auto|[^\s/]+:[0-9]{1,5})$",
        ),
    ] = "auto"
    engine_resources: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s,=]+=[0-9]+(\.[0-9]+)?(,[^\s,=]+=[0-9]+(\.[0-9]+)?)*$")] | None,
        option(
            "What an engine takes of a machine of the Ray cluster, such as CPU=4,GPU=1. Default: CPU=1, and "
            "GPU=1 unless it runs without.",
            "Hosts",
        ),
    ] = None

    # -- processes
    run_dir: Annotated[
        str | None, option("Directory for sockets, made 0700; default: a temporary one.", "Processes")
    ] = None
    startup_timeout: Annotated[
        float, option("Seconds a process has to become ready, per step of progress.", "Processes", gt=0)
    ] = 600.0
    engine_hang_timeout: Annotated[
        float,
        option(
            "Seconds an engine may be silent, at most one step, before it is killed and started again; 0: no "
            "limit.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    resume_timeout: Annotated[
        float,
        option(
            "Seconds a stream that lost its engine waits for another one to resume it; 0: streams end with "
            "their engine.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float, option("Seconds running streams have to finish after SIGTERM or SIGINT.", "Processes", ge=0)
    ] = 5.0
    log_interval: Annotated[
        float,
        option(
            "Seconds between lines on what the fleet does, while it does anything; 0: none.",
            "Processes",
            ge=0,
        ),
    ] = 10.0
    profile_dir: Annotated[
        str | None,
        option(
            "Directory for what POST /start_profile and /stop_profile record; without it they are refused.",
            "Processes",
            metavar="DIR",
        ),
    ] = None
    gc_policy: Annotated[
        Literal["idle", "default", "off"],
        option(
            "When processes collect garbage. idle: while nothing runs, and in between within the pause "
            "budget; default: when Python would; off: not at all after the start.",
            "Processes",
        ),
    ] = "idle"
    gc_pause_budget_ms: Annotated[
        float,
        option(
            "Longest pause, in milliseconds, that policy idle makes while streams run.", "Processes", gt=0
        ),
    ] = 5.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Least severity that is logged.", "Processes")
    ] = "info"

    def __post_init__(self) -> None:
        """Raises ValueError for options that contradict each other."""
        if self.engine_args and self.engine != "vllm":
            raise ValueError(
                f"--engine-args {' '.join(self.engine_args)}: these are for --engine vllm, not {self.engine}"
            )
        if self.allow_credentials and (self.allowed_origins is None or "*" in self.allowed_origins):
            raise ValueError(
                "--allow-credentials: name the pages in --allowed-origins; without, none could act in its "
                "visitor's name, with * every one could"
            )
        if self.enable_expert_parallel and self.data_parallel_size == 1:
            raise ValueError(
                "--enable-expert-parallel: experts are split over the engines of --data-parallel-size, "
                "which is 1"
            )
        if self.stream_interval_ms is not None and self.stream_interval != "auto":
            raise ValueError(
                "--stream-interval-ms: events are paced by tokens (--stream-interval) or by time, not by both"
            )
        if self.stream_interval != "auto" and self.stream_interval < self.min_stream_interval:
            raise ValueError(
                f"--min-stream-interval: {self.min_stream_interval} is more than --stream-interval, "
                f"which is {self.stream_interval}"
            )
        _check_hosts(self)
        _check_ray(self)

    @property
    def ranks(self) -> range:
        """Of the engines that this host runs."""
        first = self.data_parallel_start_rank
        count = self.data_parallel_size_local
        return range(first, self.data_parallel_size if count is None else first + count)


def _check_hosts(config: ServeConfig) -> None:
    """Raises ValueError for options of several hosts that contradict each other."""
    size, ranks = config.data_parallel_size, config.ranks
    if ranks.stop > size or (config.headless and not ranks):
        raise ValueError(
            f"--data-parallel-start-rank {ranks.start}, --data-parallel-size-local {len(ranks)}: ranks are 0 "
            f"to {size - 1} (--data-parallel-size), and a --headless host runs at least one"
        )
    if config.coordinator is None:
        for flag, given in (
            ("--headless", config.headless),
            (f"--data-parallel-size-local {len(ranks)}", len(ranks) < size),
            ("--cluster-key-file", config.cluster_key_file is not None),
        ):
            if given:
                raise ValueError(f"{flag}: needs --coordinator tcp://HOST:PORT, where engines join the fleet")
    elif config.cluster_key_file is None:
        raise ValueError(
            f"--coordinator {config.coordinator}: needs --cluster-key-file; penstock keys FILE makes one"
        )
    if config.enable_expert_parallel and (config.headless or len(ranks) < size):
        raise ValueError("--enable-expert-parallel: engines in lock-step run on one host, all of them")
    if not config.headless:
        for flag, given in (
            ("--data-parallel-start-rank", config.data_parallel_start_rank != 0),
            ("--engine-host", config.engine_host is not None),
        ):
            if given:
                raise ValueError(f"{flag}: is for a --headless host; the head runs the first ranks itself")


def _check_ray(config: ServeConfig) -> None:
    """Raises ValueError for options that do not go with, or without, engines on a Ray cluster."""
    if config.data_parallel_backend != "ray":
        for flag, given in (
            (f"--ray-address {config.ray_address}", config.ray_address != "auto"),
            (f"--engine-resources {config.engine_resources}", config.engine_resources is not None),
        ):
            if given:
                raise ValueError(f"{flag}: is for engines on a Ray cluster, --data-parallel-backend ray")
        return
    if config.coordinator is None:
        raise ValueError(
            "--data-parallel-backend ray: needs --coordinator tcp://HOST:PORT, where the cluster's machines "
            "reach this one"
        )
    for flag, given in (
        ("--headless", config.headless),
        ("--data-parallel-size-local", config.data_parallel_size_local is not None),
        ("--enable-expert-parallel", config.enable_expert_parallel),
    ):
        if given:
            raise ValueError(
                f"{flag}: does not go with --data-parallel-backend ray, which places all engines"
            )
