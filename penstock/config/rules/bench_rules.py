"""What the options of ``penstock bench`` commands need and exclude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.rules.rule import Rule, excludes, needs

if TYPE_CHECKING:
    from penstock.config.bench import (
        BenchEngineConfig,
        BenchGatewayConfig,
        BenchHostConfig,
        BenchSpeculationConfig,
    )

CONNECTION_RULES: tuple[Rule[BenchHostConfig | BenchGatewayConfig], ...] = (
    needs(
        "connections",
        lambda config: config.http2,
        "needs --http2, as HTTP/1.1 takes one connection per stream",
    ),
    excludes(
        "connections",
        lambda config: (config.connections or 0) > config.measured_streams,
        "are more than {0.measured_streams} streams",
    ),
)
HOST_RULES: tuple[Rule[BenchHostConfig], ...] = (
    needs(
        "api_server_count",
        lambda config: len(set(config.api_server_count)) == len(config.api_server_count),
        "has a number twice",
    ),
    excludes(
        "slow_readers compare_with",
        lambda config: len(config.api_server_count) > 1,
        "takes one --api-server-count",
    ),
    needs(
        "grow_load",
        lambda config: len(config.api_server_count) > 1 and not (config.requests or config.concurrency),
        "takes several --api-server-count, no --requests or --concurrency",
    ),
    needs(
        "slow_readers",
        lambda config: config.measured_streams > 0,
        "leave none of {0.streams} streams to compare",
    ),
    excludes(
        "concurrency",
        lambda config: config.in_flight > config.measured_streams,
        "requests cannot be in flight on {0.measured_streams} streams, it takes at most --streams without "
        "--slow-readers",
    ),
    excludes(
        "http2",
        lambda config: max(config.api_server_count) > config.load_connections,
        "{0.load_connections} connections leave some of --api-server-count {0.api_server_count} without load",
    ),
    excludes("compare_with", lambda config: config.slow_readers > 0, "takes no --slow-readers"),
    needs(
        "prompt_kind",
        lambda config: config.endpoint == "completions",
        "{0.endpoint} takes text only, use --endpoint completions for ids",
    ),
    excludes("logprobs", lambda config: config.endpoint == "messages", "the messages API has none"),
    needs(
        "url",
        lambda config: config.pid is not None,
        "CPU time can be read only of known processes, give them with --pid",
    ),
    needs(
        "pid",
        lambda config: config.url is not None,
        "names processes of a running server, give its address with --url",
    ),
)
ENGINE_RULES: tuple[Rule[BenchEngineConfig], ...] = (
    excludes(
        "compare_with",
        lambda config: len(config.rows) > 1 or len(config.sequence_length) > 1,
        "takes one number of --rows and one --sequence-length",
    ),
    needs(
        "api_server_count",
        lambda config: config.api_server_count <= min(config.rows),
        "is more than the streams of --rows {0.rows}",
    ),
)
SPECULATION_RULES: tuple[Rule[BenchSpeculationConfig], ...] = (
    excludes(
        "method",
        lambda config: config.method == "draft" and config.draft_model is None,
        "needs --draft-model",
    ),
    needs("draft_model", lambda config: config.method == "draft", "needs --method draft"),
)
