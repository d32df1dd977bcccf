"""The ``penstock bench`` commands: measure, print a report, write it to ``--json``."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Never, TypeVar

import msgspec

from penstock.cli import parser
from penstock.cli.command import Command
from penstock.config.bench import (
    OF_STARTED_SERVER,
    BenchAdaptersConfig,
    BenchColumnsConfig,
    BenchEmbedConfig,
    BenchEngineConfig,
    BenchGatewayConfig,
    BenchHostConfig,
    BenchImagesConfig,
    BenchRoutingConfig,
    BenchSessionConfig,
    BenchSpeculationConfig,
    BenchStartConfig,
)
from penstock.config.errors import ConfigError
from penstock.config.introspect import options_of
from penstock.config.origins import Origin, Origins
from penstock.config.values import convert

if TYPE_CHECKING:  # penstock.bench imports httpx, numpy and psutil
    from penstock.bench.deadline import ProgressCallback

C = TypeVar("C")
R = TypeVar("R")


def run_host(config: BenchHostConfig, origins: Origins) -> int:
    """1 when requests failed or nothing could be measured.

    Raises ConfigError for options of a started server when ``--url`` names a running one.
    """
    from penstock.bench import comparison, host_benchmark, report, scaling

    if config.url is not None:
        for name in OF_STARTED_SERVER:
            if name in origins and origins[name].source == "command line":
                raise ConfigError(
                    f"{origins[name]} is for a server that is started, it has no effect with --url"
                )
    if config.compare_with is not None:
        other = compared(HOST, config, config.compare_with)
        both = run_measurement(
            lambda say: comparison.measure(config, other, say), comparison.render, config.json
        )
        return 1 if both is None or both.errors else 0
    if len(config.api_server_count) > 1:
        scaled = run_measurement(lambda say: scaling.measure(config, say), scaling.render, config.json)
        return 1 if scaled is None or scaled.errors else 0
    found = run_measurement(lambda say: host_benchmark.measure(config, say), report.render, config.json)
    return 1 if found is None or found.errors else 0


def run_engine(config: BenchEngineConfig, origins: Origins) -> int:
    """1 when nothing could be measured."""
    from penstock.bench.engine_benchmark import compare, measure, render, render_comparison

    if config.compare_with is not None:
        other = compared(ENGINE, config, config.compare_with)
        both = run_measurement(lambda say: compare(config, other, say), render_comparison, config.json)
        return 1 if both is None else 0
    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_adapters(config: BenchAdaptersConfig, origins: Origins) -> int:
    """1 when nothing could be measured. Raises ConfigError for a model that the torch engine does not run."""
    from penstock.bench.adapter_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_speculation(config: BenchSpeculationConfig, origins: Origins) -> int:
    """1 when nothing could be measured. Raises ConfigError for a model that the torch engine does not run."""
    from penstock.bench.speculation_benchmark import measure, render

    found = run_measurement(lambda say: measure(config, say), render, config.json)
    return 1 if found is None else 0


def run_gateway(config: BenchGatewayConfig, origins: Origins) -> int:
    """1 when requests failed or nothing could be measured."""
    from penstock.bench import comparison
    from penstock.bench.gateway_benchmark import compare_gateways, measure_gateway, render

    if config.compare_with is not None:
        other = compared(GATEWAY, config, config.compare_with)
        both = run_measurement(
            lambda say: compare_gateways(config, other, say), comparison.render, config.json
        )
        return 1 if both is None or both.errors else 0
    found = run_measurement(lambda say: measure_gateway(config, say), render, config.json)
    return 1 if found is None or found.errors else 0


def run_session(config: BenchSessionConfig, origins: Origins) -> int:
    """1 when a turn failed or nothing could be measured."""
    from penstock.bench.session_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_columns(config: BenchColumnsConfig, origins: Origins) -> int:
    """1 when a reply failed or nothing could be measured."""
    from penstock.bench.columns_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_embed(config: BenchEmbedConfig, origins: Origins) -> int:
    """1 when a request failed or nothing could be measured."""
    from penstock.bench.embed.embed_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_images(config: BenchImagesConfig, origins: Origins) -> int:
    """1 when a request failed or nothing could be measured."""
    from penstock.bench.images.images_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_start(config: BenchStartConfig, origins: Origins) -> int:
    """1 when nothing could be measured."""
    from penstock.bench.start_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


def run_routing(config: BenchRoutingConfig, origins: Origins) -> int:
    """1 when nothing could be measured. Raises ConfigError for scorers that there are not."""
    from penstock.bench.fleet.routing_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


HOST = Command(("bench", "host"), "Measure CPU time per token of API servers.", BenchHostConfig, run_host)
ENGINE = Command(
    ("bench", "engine"), "Measure CPU time per decode step of an engine.", BenchEngineConfig, run_engine
)
ADAPTERS = Command(
    ("bench", "adapters"),
    "Measure the time of a decode step with LoRA adapters.",
    BenchAdaptersConfig,
    run_adapters,
)
SPECULATION = Command(
    ("bench", "speculation"),
    "Measure output tokens per second with speculative decoding.",
    BenchSpeculationConfig,
    run_speculation,
)
SESSION = Command(
    ("bench", "session"),
    "Measure CPU time per turn of a long conversation.",
    BenchSessionConfig,
    run_session,
)
COLUMNS = Command(
    ("bench", "columns"),
    "Measure CPU time of a reply as columns, and as JSON.",
    BenchColumnsConfig,
    run_columns,
)
EMBED = Command(
    ("bench", "embed"),
    "Measure CPU time of API servers per request for vectors.",
    BenchEmbedConfig,
    run_embed,
)
IMAGES = Command(
    ("bench", "images"),
    "Measure what pictures cost, and whom they delay.",
    BenchImagesConfig,
    run_images,
)
START = Command(
    ("bench", "start"),
    "Measure CPU time and memory of a server's start, and its end.",
    BenchStartConfig,
    run_start,
)
ROUTING = Command(
    ("bench", "routing"),
    "Simulate a fleet, to compare ways of choosing its servers.",
    BenchRoutingConfig,
    run_routing,
)
GATEWAY = Command(
    ("bench", "gateway"), "Measure CPU time per event of the gateway.", BenchGatewayConfig, run_gateway
)


OF_BOTH = (
    "rounds",
    "timeout",
    "json",
    "compare_with",
    "url",
    "pid",
    "slow_readers",
    "servers",
)
"""Fields that a second measurement cannot change: it runs by turns with the first."""


def compared(command: Command[C], config: C, text: str) -> C:
    """``config`` with the options in ``text``, which a shell would split. Raises ConfigError."""
    by_field = {option.field: option for option in options_of(command.config)}
    try:
        given = parser.parse(command, shlex.split(text)).arguments
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"--compare-with: {error}") from None
    changes = {}
    for field, value in given.items():
        option = by_field[field]
        if field in OF_BOTH:
            raise ConfigError(f"--compare-with: {option.flag} holds for both measurements")
        changes[field] = convert(option, Origin("command line", f"--compare-with: {option.flag}"), value)
    values = vars(config) | {"compare_with": None}
    if changes.get("http2") is False:
        values["connections"] = None  # HTTP/1.1 takes one per stream
    try:
        return msgspec.convert(values | changes, command.config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--compare-with: {error}") from None


def run_measurement(
    measure: Callable[[ProgressCallback], R], render: Callable[[R], str], path: str | None
) -> R | None:
    """Run ``measure`` with progress on standard error, print its report and write it to ``path`` as JSON.

    None, with the reason on standard error, when nothing could be measured or written.
    """
    from penstock.bench.errors import BenchError

    try:
        with _sigterm_interrupts():
            report = measure(lambda line: print(line, file=sys.stderr, flush=True))
        print(render(report))
        if path is not None:
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except (BenchError, OSError) as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return None
    return report


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that a measurement cleans up as it does after Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> Never:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
