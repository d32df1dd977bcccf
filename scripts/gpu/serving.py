"""Stages c and f: ``penstock serve`` with random weights, as a user starts it, under the load client of
``penstock bench host``."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.process import LoadProcess
from penstock.bench.process_usage import cpu_time, pids_of_supervisor
from penstock.bench.server_process import ServerProcess
from scripts.gpu.measuring import STARTS, Stage, shortened
from scripts.gpu.shapes import Shape, find_shape

START_S = 90.0
"""Limit of the server's start."""
VLLM_AND_AIM = {2000: (13.1, 40.0), 500: (51.7, 400.0)}
"""Requests/s with opt-125m, 48 tokens in, by the tokens out: users' figures of vLLM, and Penstock's aims."""
_WARNING = re.compile(r"^\S+ (?:WARNING|ERROR)\s+(.*)")
_CACHE_TOKENS = re.compile(r"kv_cache_tokens ([\d,]+)")
_STEPS = re.compile(r"^penstock:engine_steps_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """All requests of a measurement, which are sent at once. ``interval``: tokens per event."""

    streams: int
    prompt: int
    output: int
    interval: int
    seconds: float

    @property
    def name(self) -> str:
        streams = f"{self.streams:,} stream{'s' if self.streams > 1 else ''}"
        return f"{streams}, {self.prompt} in, {self.output} out, interval {self.interval}"


def loads_of_streams(*, tiny: bool) -> list[Load]:
    """What many users wait for comes first, then what one user sees, then fewer events."""
    if tiny:
        return [Load(4, 8, 16, 1, 20), Load(1, 8, 16, 1, 20), Load(4, 8, 16, 10, 20)]
    counts = [(64, 1), (1, 1), (256, 1), (1024, 1), (1024, 10), (256, 10), (64, 10), (1, 10)]
    return [Load(streams, 128, 128, interval, 30) for streams, interval in counts]


def loads_of_seeds(*, tiny: bool) -> list[Load]:
    """48 tokens in, 500 and 2,000 out, all requests at once; as many as 80 GB hold to their ends."""
    if tiny:
        return [Load(8, 12, 50, 1, 20), Load(8, 12, 50, 10, 20)]
    return [Load(1024, 48, 500, 1, 25), Load(1024, 48, 500, 10, 25), Load(800, 48, 2000, 1, 60)]


class Served:
    """A running server with one API server and one engine."""

    def __init__(self, stage: Stage, shape: Shape, folder: Path) -> None:
        """Starts it and waits until it is ready. Raises BenchError."""
        arguments = ["serve", shape.write(folder), "--load-format=dummy", "--port=0", "--drain-timeout=1"]
        arguments += [f"--served-model-name={shape.name}", f"--device={stage.device}"]
        if stage.tiny:
            arguments += ["--kv-cache-memory=33554432", "--threads=1"]
        seconds = stage.limit(START_S)
        self.cache_tokens = ""

        def read(line: str) -> None:
            sys.stdout.write(f"| {line}")
            if warning := _WARNING.search(line):
                stage.warn(warning[1])
            if found := _CACHE_TOKENS.search(line):
                self.cache_tokens = found[1]

        self.process = ServerProcess(arguments, seconds, on_line=read)
        self._model = shape.name

    def run(self, load: Load, prompts: list[list[int]], seconds: float) -> dict[str, Any]:
        """The figures of a load; with an ``error`` where requests failed. Raises BenchError when it does not
        finish in time."""
        body = {
            "model": self._model,
            "max_tokens": load.output,
            "ignore_eos": True,
            "stream": True,
            "stream_interval": load.interval,
        }
        parts = urlsplit(self.process.url)
        plan = LoadPlan(
            host=parts.hostname or "",
            port=parts.port or 0,
            path="/v1/completions",
            bodies=[json.dumps(body | {"prompt": prompt}) for prompt in prompts],
            connections=load.streams,
            in_flight=load.streams,
            requests=load.streams,
        )
        pids = pids_of_supervisor(self.process.pid)
        with LoadProcess(plan, seconds) as client:
            steps = self._steps()
            api_servers, engines = cpu_time(pids.api_servers), cpu_time(pids.engines)
            result = client.run(keep=False, seconds=seconds)
            api_servers = cpu_time(pids.api_servers) - api_servers
            engines, steps = cpu_time(pids.engines) - engines, self._steps() - steps
        tokens = (result.requests - result.errors) * load.output
        error = {"error": shortened(f"{result.error_samples}")} if result.errors else {}
        return error | {
            "tokens/s": tokens / result.wall_s,
            "requests/s": (result.requests - result.errors) / result.wall_s,
            "steps/s": steps / result.wall_s,
            "TTFT p50 ms": result.ttft_ms.p50,
            "TTFT p99 ms": result.ttft_ms.p99,
            "ITL p50 ms": result.itl_ms.p50,
            "ITL p99 ms": result.itl_ms.p99,
            "API server µs/token": api_servers.total * 1e6 / max(1, tokens),
            "engine CPU µs/token": engines.total * 1e6 / max(1, tokens),
            "client CPU": result.cpu_s / result.wall_s,
            "failed": result.errors,
        }

    def _steps(self) -> float:
        with urllib.request.urlopen(f"{self.process.url}/metrics", timeout=10) as reply:
            return sum(map(float, _STEPS.findall(reply.read().decode())))


def main() -> None:
    stage = Stage("shape", "loads")
    shape, seeds = find_shape(stage.options.shape, tiny=stage.tiny), stage.options.loads == "seeds"
    table = "f. seeds" if seeds else "c. serve"
    started = f"{shape.name}: {'seeds' if seeds else 'serve'}"
    loads = (loads_of_seeds if seeds else loads_of_streams)(tiny=stage.tiny)
    served = None
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        try:
            with stage.measurement(STARTS, started, START_S) as values:
                began = stage.left()
                served = Served(stage, shape, Path(folder))
                values["seconds"] = began - stage.left()
                values["KV cache tokens"] = served.cache_tokens
            if served is None:
                sys.exit("the server did not start")
            with stage.measurement(STARTS, f"{started}, first request", 30) as values:
                first = served.run(Load(1, 16, 8, 1, 30), shape.prompts(1, 16), stage.limit(30))
                values["seconds"] = (first["TTFT p50 ms"] or 0.0) / 1000
            for number, load in enumerate(loads):
                with stage.measurement(table, f"{shape.name}: {load.name}", load.seconds + 5) as values:
                    prompts = shape.prompts(load.streams, load.prompt, seed=number)
                    values |= served.run(load, prompts, stage.limit(load.seconds))
                    if seeds:
                        values |= beside_vllm(values, load.output)
        finally:
            if served is not None:
                served.process.close()


def beside_vllm(values: dict[str, Any], output: int) -> dict[str, float]:
    """vLLM's figure and the aim for so many tokens out, and the ratio to vLLM's."""
    if output not in VLLM_AND_AIM:
        return {}
    vllm, aim = VLLM_AND_AIM[output]
    return {"vLLM requests/s": vllm, "aim requests/s": aim, "to vLLM": float(values["requests/s"]) / vllm}


if __name__ == "__main__":
    main()
