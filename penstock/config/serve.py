"""The config of ``penstock serve``: all groups of options, and checks of their combinations.

Name, type, bounds, default and text of an option stand once, in :mod:`penstock.config.options`. Command line,
YAML file, environment and the options page are derived from there.
"""

from __future__ import annotations

from typing import Any

from penstock.config.describe import option_group
from penstock.config.kv_events import KVEventsConfig, check_addresses, read_kv_events_config
from penstock.config.options.adapters import AdapterOptions
from penstock.config.options.attach import AttachOptions
from penstock.config.options.compaction import CompactionOptions
from penstock.config.options.cors import CorsOptions
from penstock.config.options.effort_map import read_effort_map
from penstock.config.options.engines import EngineOptions
from penstock.config.options.hosts import HEAD, HostOptions
from penstock.config.options.http import HttpOptions
from penstock.config.options.keys import KeyOptions
from penstock.config.options.listen import ListenOptions
from penstock.config.options.logs import LogOptions
from penstock.config.options.media import MediaOptions, read_mm_limits, read_processor_kwargs
from penstock.config.options.models import ModelOptions
from penstock.config.options.processes import ProcessOptions
from penstock.config.options.response_store import ResponseStoreOptions
from penstock.config.options.shutdown import ShutdownOptions
from penstock.config.options.speculation import SpeculationOptions
from penstock.config.options.streams import StreamedReplyOptions
from penstock.config.options.synthetic import SyntheticOptions
from penstock.config.options.tls import TlsOptions
from penstock.config.options.tracing import TracingOptions
from penstock.config.rules.allowed_hosts import AllowedHosts
from penstock.config.rules.rule import check
from penstock.config.rules.serve_rules import RULES, WITH_ATTACH, WITHOUT_ATTACH
from penstock.config.rules.shared_rules import SHARED_RULES


@option_group
class ServeConfig(
    ModelOptions,
    ListenOptions,
    KeyOptions,
    HttpOptions,
    CorsOptions,
    TlsOptions,
    StreamedReplyOptions,
    ResponseStoreOptions,
    CompactionOptions,
    EngineOptions,
    AdapterOptions,
    SpeculationOptions,
    MediaOptions,
    SyntheticOptions,
    HostOptions,
    AttachOptions,
    ProcessOptions,
    ShutdownOptions,
    LogOptions,
    TracingOptions,
):
    """The options of ``penstock serve``. Child processes receive all of them, as JSON."""

    def __post_init__(self) -> None:
        """Raise ValueError for options that contradict each other."""
        if self.attach is None:
            _check_ranks(self)
            check(self, WITHOUT_ATTACH)
        else:
            _check_ports(self)
            check(self, WITH_ATTACH)
            # All that is said of an engine that is started here holds for one that is started elsewhere.
            object.__setattr__(self, "engine", "vllm")
        check(self, SHARED_RULES)
        check(self, RULES)
        if self.enable_lora and self.engine != "vllm" and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"--max-cpu-loras {self.max_cpu_loras}: it must be at least --max-loras, which is "
                f"{self.max_loras}"
            )
        _check_kv_events(self)
        read_effort_map(self.reasoning_effort_map)
        read_mm_limits(self.limit_mm_per_prompt)
        read_processor_kwargs(self.mm_processor_kwargs)
        AllowedHosts(self.allowed_media_domains or ())

    @property
    def kv_events(self) -> KVEventsConfig:
        """``--kv-events-config``, read."""
        return (
            KVEventsConfig()
            if self.kv_events_config is None
            else read_kv_events_config(self.kv_events_config)
        )

    @property
    def reasoning_efforts(self) -> dict[str, str | int]:
        """``--reasoning-effort-map``, read."""
        return read_effort_map(self.reasoning_effort_map)

    @property
    def max_images(self) -> int:
        """Pictures of one request, by ``--limit-mm-per-prompt``."""
        return read_mm_limits(self.limit_mm_per_prompt)

    @property
    def processor_kwargs(self) -> dict[str, Any]:
        """``--mm-processor-kwargs``, read."""
        return read_processor_kwargs(self.mm_processor_kwargs)

    @property
    def ranks(self) -> range:
        """Ranks of the engines that this host runs, or attaches."""
        if self.attach is not None:
            return range(self.data_parallel_size)
        first = self.data_parallel_start_rank
        count = self.data_parallel_size_local
        return range(first, self.data_parallel_size if count is None else first + count)

    @property
    def api_servers(self) -> list[str]:
        """``--api-server-hosts``, read."""
        return self.api_server_hosts.split(",") if self.api_server_hosts else [HEAD]

    def host_of_server(self, index: int) -> str:
        """The entry of --api-server-hosts for this API server. A replacement runs on the same host."""
        return self.api_servers[index % self.api_server_count % len(self.api_servers)]


def _check_ports(config: ServeConfig) -> None:
    """Raise ValueError for an address without ports for engines that run elsewhere, or numbers of them per
    host that do not make up the whole."""
    flag = f"--attach {config.attach}"
    port = int(str(config.attach).rpartition(":")[2])
    size, local = config.data_parallel_size, config.data_parallel_size_local
    last = port + 2 * size if port else 0
    if max(port, last) >= 1 << 16:
        what = f"{size} engines take ports up to {last}" if port < 1 << 16 else f"{port} is no port"
        raise ValueError(f"{flag}: {what}, and 65535 is the last one")
    if config.print_engine_command and not port:
        raise ValueError(f"--print-engine-command: needs a port, and {flag} takes any that is free")
    if local is not None and (local < 1 or size % local):
        raise ValueError(
            f"--data-parallel-size-local {local}: with {flag} it is the number of engines per host, which "
            f"divides --data-parallel-size {size}"
        )


def _check_ranks(config: ServeConfig) -> None:
    """Raise ValueError for ranks that the server has not."""
    size, ranks = config.data_parallel_size, config.ranks
    if ranks.stop > size or (config.headless and not ranks):
        raise ValueError(
            f"--data-parallel-start-rank {ranks.start}, --data-parallel-size-local {len(ranks)}: ranks are 0 "
            f"to {size - 1} (--data-parallel-size), and a --headless host runs at least one"
        )


def _check_kv_events(config: ServeConfig) -> None:
    """Raise ValueError for KV cache events that no engine could publish."""
    events = config.kv_events
    if not events.publishes:
        return
    if config.engine == "synthetic":
        raise ValueError("--kv-events-config: the synthetic engine has no KV cache to publish events of")
    if not config.enable_prefix_caching:
        raise ValueError("--kv-events-config: events are those of the prefix cache, which is off")
    check_addresses(events, config.data_parallel_size)
