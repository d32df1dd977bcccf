"""Every option of ``penstock serve``, once: name and default here, the rest in :mod:`penstock.config.groups`.

Command line, YAML file, environment and the documentation table are derived from these fields by
:mod:`penstock.config.sources`; nothing else may state a name, a default or a bound again.
"""

from __future__ import annotations

import msgspec

from penstock.config.groups import cors, engines, hosts, http, models, processes, streams, synthetic, tls


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``penstock serve`` runs with. Children receive it whole, as JSON."""

    # -- Model
    model: models.Model = None
    served_model_name: models.ServedModelName = None
    revision: models.Revision = None
    tokenizer: models.Tokenizer = None
    chat_template: models.ChatTemplate = None
    tool_call_parser: models.ToolCallParser = "auto"
    reasoning_parser: models.ReasoningParser = "auto"
    generation_config: models.GenerationConfig = "auto"
    max_model_len: models.MaxModelLen = None
    dtype: models.Dtype = "auto"
    load_format: models.LoadFormat = "auto"
    seed: models.Seed = 0

    # -- HTTP server
    host: http.Host = "127.0.0.1"
    port: http.Port = 8000
    uds: http.Uds = None
    uds_mode: http.UdsMode = "660"
    root_path: http.RootPath = ""
    api_key: http.ApiKey = None
    api_key_file: http.ApiKeyFile = None
    api_server_count: http.ApiServerCount = 1
    max_request_bytes: http.MaxRequestBytes = 64 << 20
    max_header_bytes: http.MaxHeaderBytes = 64 << 10
    header_timeout: http.HeaderTimeout = 30.0
    keep_alive_timeout: http.KeepAliveTimeout = 75.0
    max_connections: http.MaxConnections = 65536
    access_log: http.AccessLog = "none"
    enable_request_id_headers: http.EnableRequestIdHeaders = False
    strict_requests: http.StrictRequests = False
    enable_force_include_usage: http.EnableForceIncludeUsage = False
    max_logprobs: http.MaxLogprobs = 20

    # -- CORS
    allowed_origins: cors.AllowedOrigins = None
    allowed_methods: cors.AllowedMethods = None
    allowed_headers: cors.AllowedHeaders = None
    allow_credentials: cors.AllowCredentials = False

    # -- TLS
    ssl_certfile: tls.SslCertfile = None
    ssl_keyfile: tls.SslKeyfile = None
    enable_ssl_refresh: tls.EnableSslRefresh = False
    ssl_ca_certs: tls.SslCaCerts = None
    ssl_cert_reqs: tls.SslCertReqs = 0

    # -- Streaming
    stream_interval: streams.StreamInterval = "auto"
    min_stream_interval: streams.MinStreamInterval = 1
    stream_interval_ms: streams.StreamIntervalMs = None
    max_stream_backlog: streams.MaxStreamBacklog = 4 << 20
    sse_keep_alive: streams.SseKeepAlive = 15.0
    compat_done_after_error: streams.CompatDoneAfterError = False

    # -- Engine
    engine: engines.Engine = "torch"
    engine_args: engines.EngineArgs = None
    data_parallel_size: engines.DataParallelSize = 1
    enable_expert_parallel: engines.EnableExpertParallel = False
    dp_sync_interval: engines.DpSyncInterval = 32
    max_num_seqs: engines.MaxNumSeqs = 1024
    max_num_batched_tokens: engines.MaxNumBatchedTokens = 2048
    max_prefill_delay: engines.MaxPrefillDelay = 3.0
    scheduling_policy: engines.SchedulingPolicy = "fcfs"
    max_num_queued_reqs: engines.MaxNumQueuedReqs = None
    max_num_queued_tokens: engines.MaxNumQueuedTokens = None
    device: engines.Device = "auto"
    async_scheduling: engines.AsyncScheduling = "auto"
    block_size: engines.BlockSize = 16
    enable_prefix_caching: engines.EnablePrefixCaching = True
    kv_cache_memory: engines.KvCacheMemory = None
    gpu_memory_utilization: engines.GpuMemoryUtilization = 0.9
    threads: engines.Threads = None

    # -- Synthetic engine
    synthetic_step_ms: synthetic.SyntheticStepMs = 10.0
    synthetic_prefill_tokens_per_s: synthetic.SyntheticPrefillTokensPerS = 0.0
    synthetic_fault: synthetic.SyntheticFault = None

    # -- Hosts
    data_parallel_size_local: hosts.DataParallelSizeLocal = None
    data_parallel_start_rank: hosts.DataParallelStartRank = 0
    headless: hosts.Headless = False
    coordinator: hosts.Coordinator = None
    cluster_key_file: hosts.ClusterKeyFile = None
    engine_host: hosts.EngineHost = None
    data_parallel_backend: hosts.DataParallelBackend = "mp"
    ray_address: hosts.RayAddress = "auto"
    engine_resources: hosts.EngineResources = None
    api_server_hosts: hosts.ApiServerHosts = None

    # -- Processes
    run_dir: processes.RunDir = None
    startup_timeout: processes.StartupTimeout = 600.0
    engine_hang_timeout: processes.EngineHangTimeout = 60.0
    resume_timeout: processes.ResumeTimeout = 60.0
    drain_timeout: processes.DrainTimeout = 5.0
    log_interval: processes.LogInterval = 10.0
    profile_dir: processes.ProfileDir = None
    gc_policy: processes.GcPolicy = "idle"
    gc_pause_budget_ms: processes.GcPauseBudgetMs = 5.0
    log_level: processes.LogLevel = "info"

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

    def host_of_server(self, index: int) -> str:
        """Which of --api-server-hosts has this API server; one that replaces another is where that was."""
        names = self.api_server_hosts.split(",") if self.api_server_hosts else [hosts.HEAD]
        return names[index % self.api_server_count % len(names)]


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
            (f"--api-server-hosts {config.api_server_hosts}", config.api_server_hosts is not None),
        ):
            if given:
                raise ValueError(f"{flag}: is for a Ray cluster, --data-parallel-backend ray")
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
    if config.api_server_hosts is not None:
        _check_server_hosts(config, config.api_server_hosts.split(","))


def _check_server_hosts(config: ServeConfig, names: list[str]) -> None:
    """Raises ValueError for options that do not go with API servers on several hosts."""
    flag = f"--api-server-hosts {','.join(names)}"
    if config.api_server_count < len(names):
        raise ValueError(f"{flag}: --api-server-count {config.api_server_count} leaves hosts without one")
    if set(names) != {hosts.HEAD} and (config.port == 0 or config.uds is not None):
        other = "--port 0" if config.uds is None else f"--uds {config.uds}"
        raise ValueError(f"{flag}: does not go with {other}; every host listens on the same port")
