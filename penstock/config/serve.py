"""The config of ``penstock serve``: all groups of options, and checks of their combinations.

Name, type, bounds, default and text of an option stand once, in :mod:`penstock.config.options`. Command line,
YAML file, environment and the options page are derived from there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.kv_events import KVEventsConfig, check_addresses, read_kv_events_config
from penstock.config.options.adapters import AdapterOptions
from penstock.config.options.hosts import HEAD
from penstock.config.options.processes import ProcessOptions


class ServeConfig(ProcessOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of ``penstock serve``. Child processes receive all of them, as JSON."""

    def __post_init__(self) -> None:
        """Raises ValueError for options that contradict each other."""
        if self.attach is not None:
            _check_attach(self)
            # The same engine, in another process: all that is said of one holds for the other.
            msgspec.structs.force_setattr(self, "engine", "vllm")
        elif self.print_engine_command:
            raise ValueError("--print-engine-command: needs --attach HOST:PORT, where the engines connect")
        if self.engine_args and self.engine != "vllm":
            raise ValueError(
                f"--engine-args {' '.join(self.engine_args)}: these are for --engine vllm, not {self.engine}"
            )
        if self.synthetic_script is not None and self.engine != "synthetic":
            raise ValueError(
                f"--synthetic-script {self.synthetic_script}: is for --engine synthetic, not {self.engine}"
            )
        if self.synthetic_script is not None and self.synthetic_tokens_per_step > 1:
            raise ValueError(
                "--synthetic-tokens-per-step: a script's replies have the tokens-per-step of their pace"
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
        if self.response_store_dir is not None and self.response_store != "disk":
            raise ValueError(
                f"--response-store-dir {self.response_store_dir}: is for --response-store disk, not "
                f"{self.response_store}"
            )
        _check_batch_invariant(self)
        _check_adapters(self)
        _check_speculation(self)
        _check_kv_events(self)
        _check_hosts(self)
        _check_ray(self)

    @property
    def kv_events(self) -> KVEventsConfig:
        """``--kv-events-config``, read."""
        return (
            KVEventsConfig()
            if self.kv_events_config is None
            else read_kv_events_config(self.kv_events_config)
        )

    @property
    def ranks(self) -> range:
        """Ranks of the engines that this host runs, or attaches."""
        if self.attach is not None:
            return range(self.data_parallel_size)
        first = self.data_parallel_start_rank
        count = self.data_parallel_size_local
        return range(first, self.data_parallel_size if count is None else first + count)

    def host_of_server(self, index: int) -> str:
        """The entry of --api-server-hosts for this API server. A replacement runs on the same host."""
        names = self.api_server_hosts.split(",") if self.api_server_hosts else [HEAD]
        return names[index % self.api_server_count % len(names)]


def _check_attach(config: ServeConfig) -> None:
    """Raises ValueError for options that do not go with engines that run elsewhere."""
    flag = f"--attach {config.attach}"
    port = int(str(config.attach).rpartition(":")[2])
    size = config.data_parallel_size
    last = port + 2 * size if port else 0
    if max(port, last) >= 1 << 16:
        what = f"{size} engines take ports up to {last}" if port < 1 << 16 else f"{port} is no port"
        raise ValueError(f"{flag}: {what}, and 65535 is the last one")
    if config.print_engine_command and not port:
        raise ValueError(f"--print-engine-command: needs a port, and {flag} takes any that is free")
    if config.model is None:
        raise ValueError(
            f"{flag}: name MODEL, the engines' model; its config and tokenizer are needed here, too"
        )
    for option, given, why in (
        ("--engine synthetic", config.engine == "synthetic", "it attaches vLLM's engines"),
        (
            f"--data-parallel-start-rank {config.data_parallel_start_rank}",
            config.data_parallel_start_rank > 0,
            "it is an option of the engines' commands",
        ),
        ("--headless", config.headless, "attached engines may run on any host; this one serves them"),
        ("--coordinator", config.coordinator is not None, "attached engines may run on any host"),
        ("--data-parallel-backend ray", config.data_parallel_backend == "ray", "it starts no engines"),
        (
            "--enable-expert-parallel",
            config.enable_expert_parallel,
            "it is an option of the engines: give it to them, or behind --",
        ),
    ):
        if given:
            raise ValueError(f"{option}: does not go with {flag}: {why}")
    local = config.data_parallel_size_local
    if local is not None and (local < 1 or config.data_parallel_size % local):
        raise ValueError(
            f"--data-parallel-size-local {local}: with {flag} it is the number of engines per host, which "
            f"divides --data-parallel-size {config.data_parallel_size}"
        )


def _check_batch_invariant(config: ServeConfig) -> None:
    """Raises ValueError for options with which rows depend on their batch."""
    if config.batch_invariant:
        if config.engine == "synthetic":
            raise ValueError("--batch-invariant: is for --engine torch, not synthetic: it runs no model")
        for flag, given in (
            ("--enable-lora", config.enable_lora),
            ("--enable-expert-parallel", config.enable_expert_parallel),
            (f"--block-size {config.block_size}, which is no multiple of 16", config.block_size % 16 != 0),
        ):
            if given:
                raise ValueError(f"--batch-invariant: does not go with {flag}")


_ADAPTER_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for field in msgspec.structs.fields(AdapterOptions)
    if field.name in {"lora_modules", "lora_dir", "max_loras", "max_lora_rank", "max_cpu_loras"}
}


def _check_adapters(config: ServeConfig) -> None:
    """Raises ValueError for options of adapters that contradict each other. With vLLM's engine others may
    stand behind ``--``: :mod:`penstock.engine.lora.lora_modules` reads these, and checks all."""
    if not config.enable_lora and config.engine != "vllm":
        for name, default in _ADAPTER_DEFAULTS.items():
            if getattr(config, name) != default:
                raise ValueError(f"--{name.replace('_', '-')}: needs --enable-lora")
    if config.enable_lora and config.engine != "vllm" and config.max_cpu_loras < config.max_loras:
        raise ValueError(
            f"--max-cpu-loras {config.max_cpu_loras}: it must be at least --max-loras, which is "
            f"{config.max_loras}"
        )


def _check_speculation(config: ServeConfig) -> None:
    """Raises ValueError for options of speculative decoding that contradict each other."""
    method = config.speculative_method
    if method != "none" and config.engine != "torch":
        other = "give --speculative-config behind --" if config.engine == "vllm" else "it runs no model"
        raise ValueError(
            f"--speculative-method {method}: is for --engine torch, not {config.engine}: {other}"
        )
    if method == "draft" and config.draft_model is None:
        raise ValueError("--speculative-method draft: needs --draft-model")
    if method != "draft" and config.draft_model is not None:
        raise ValueError(f"--draft-model {config.draft_model}: needs --speculative-method draft")
    if method == "none" and config.speculative_tokens != "auto":
        raise ValueError(
            f"--speculative-tokens {config.speculative_tokens}: needs --speculative-method ngram, suffix or "
            "draft"
        )
    if method != "suffix" and config.suffix_cache_bytes != _DEFAULT_SUFFIX_BYTES:
        raise ValueError(
            f"--suffix-cache-bytes {config.suffix_cache_bytes}: needs --speculative-method suffix"
        )


_DEFAULT_SUFFIX_BYTES = next(
    field.default for field in msgspec.structs.fields(ServeConfig) if field.name == "suffix_cache_bytes"
)


def _check_kv_events(config: ServeConfig) -> None:
    """Raises ValueError for KV cache events that no engine could publish."""
    events = config.kv_events
    if not events.publishes:
        return
    if config.engine == "synthetic":
        raise ValueError("--kv-events-config: the synthetic engine has no KV cache to publish events of")
    if not config.enable_prefix_caching:
        raise ValueError("--kv-events-config: events are those of the prefix cache, which is off")
    check_addresses(events, config.data_parallel_size)


def _check_hosts(config: ServeConfig) -> None:
    """Raises ValueError for options of several hosts that contradict each other."""
    if config.attach is not None:
        return
    size, ranks = config.data_parallel_size, config.ranks
    if ranks.stop > size or (config.headless and not ranks):
        raise ValueError(
            f"--data-parallel-start-rank {ranks.start}, --data-parallel-size-local {len(ranks)}: ranks are 0 "
            f"to {size - 1} (--data-parallel-size), and a --headless host runs at least one"
        )
    if config.coordinator is None:
        for flag, given in (
            ("--headless", config.headless),
            (f"--data-parallel-start-rank {ranks.start}", ranks.start > 0),
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
    if set(names) != {HEAD} and (config.port == 0 or config.uds is not None):
        other = "--port 0" if config.uds is None else f"--uds {config.uds}"
        raise ValueError(f"{flag}: does not go with {other}; every host listens on the same port")
