"""Stage d: what this device can do at most, and how much of it the steps of stage c reach.

A decode step must read all weights and the keys and values of its streams; a prompt needs so many floating
point operations. Both are compared with a large copy and a matrix product, measured here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.measuring import STARTS, Stage, tell
from scripts.gpu.shapes import Shape, find_shape

REPEATS, ROUNDS = 5, 4
MACHINE = "d. machine"


@dataclass(frozen=True)
class Parameters:
    """Numbers of a model's parameters: those that a decode step reads, and those that a prompt's tokens are
    multiplied by. The table of embeddings counts only where it is the LM head as well."""

    decode: int
    prefill: int


def parameters_of(folder: str) -> Parameters:
    """Of the model whose config.json is in ``folder``, without making its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    total = sum(each.numel() for each in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = table is head
    return Parameters(
        total - (0 if tied else table.numel()), total - table.numel() - (0 if tied else head.numel())
    )


def prefill_flops(shape: Shape, parameters: int, prompts: int, length: int) -> float:
    """Of ``prompts`` of ``length`` tokens: two per parameter and token, and four per element of queries and
    pair of tokens, half of which are masked."""
    pairs = length * (length + 1) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_size * pairs
    return prompts * (2.0 * parameters * length + attention)


def decode_row(values: dict[str, float], weights: float, bytes_per_s: float) -> dict[str, float]:
    """A decode step of stage c beside the bytes that it must read: ``weights`` and the KV cache."""
    keys_and_values = values["KV GB"] * 1e9
    moved = weights + keys_and_values
    floor = moved / bytes_per_s * 1000
    row = {"GB/step": moved / 1e9, "of it KV GB": values["KV GB"], "floor ms": floor}
    row |= {"step ms": values["step ms"], "achieved %": 100 * floor / values["step ms"]}
    row["device achieved %"] = 100 * floor / max(values["device busy ms"], 1e-9)
    if values["attention ms"]:
        rate = keys_and_values / values["attention ms"] * 1000
        row |= {"attention GB/s": rate / 1e9, "attention %": 100 * rate / bytes_per_s}
    return row


def prefill_row(values: dict[str, float], flops: float, flops_per_s: float) -> dict[str, float]:
    """A prefill of stage c beside its floating point operations."""
    floor = flops / flops_per_s * 1000
    return {"TFLOP": flops / 1e12, "floor ms": floor, "ms": values["ms"]} | {
        "achieved %": 100 * floor / values["ms"],
        "TFLOP/s": flops / values["ms"] * 1000 / 1e12,
    }


def rate(device: str, amount: float, call: Callable[[], object]) -> float:
    """``amount`` per second, in the best of a few rounds."""
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(REPEATS):
            call()
        _wait(device)
        times.append((time.perf_counter() - began) / REPEATS)
    return amount / min(times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_machine(stage: Stage) -> dict[str, float]:
    """Bytes per second of a copy and of a read, and FLOP/s of a product of bfloat16 matrices."""
    elements, side = ((1 << 22), 256) if stage.tiny else ((1 << 31), 8192)
    found: dict[str, float] = {}
    with stage.measurement(MACHINE, "copy", 10) as values:
        source = torch.ones(elements, dtype=torch.bfloat16, device=stage.device)
        target = torch.empty_like(source)
        found["copy"] = rate(stage.device, 4.0 * elements, lambda: target.copy_(source))
        values["GB/s"] = found["copy"] / 1e9
    with stage.measurement(MACHINE, "read", 10) as values:
        found["read"] = rate(stage.device, 2.0 * elements, lambda: source.view(torch.int16).amax())
        values["GB/s"] = found["read"] / 1e9
    with stage.measurement(MACHINE, "bfloat16 matrix product", 10) as values:
        left, right = (torch.randn(side, side, device=stage.device).bfloat16() for _ in range(2))
        found["product"] = rate(stage.device, 2.0 * side**3, lambda: left @ right)
        values["TFLOP/s"] = found["product"] / 1e12
    return found


def served_rows(
    served: dict[str, dict[str, float]], steps: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """By number of streams: the time of a step as a client sees it, the inter-token latency at one token per
    event, beside the same number of streams in an engine alone, and beside the device's work in them. The
    contexts differ: "engine alone" names the row of steps."""
    rows: dict[str, dict[str, Any]] = {}
    alone = {name.partition(" stream")[0]: (name, values) for name, values in reversed(steps.items())}
    for name, values in served.items():
        streams = name.partition(" stream")[0]
        if not name.endswith("interval 1") or "error" in values or streams not in alone:
            continue
        title, engine = alone[streams]
        own, busy = values["ITL p50 ms"], engine.get("device busy ms")
        if own and busy is not None:
            rows[name] = {"ITL p50 ms": own, "engine alone": title, "step ms": engine["step ms"]}
            rows[name] |= {"device busy ms": busy, "device idle %": 100 * (1 - busy / own)}
    return rows


def tell_shape(stage: Stage, shape: Shape, bytes_per_s: float, flops_per_s: float) -> None:
    """What stage c has measured of a shape, beside what the device can do."""
    steps = stage.told("c. steps", shape.name)
    dtype = stage.told(STARTS, shape.name)["steps"]["dtype"]
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        parameters = parameters_of(shape.write(Path(folder)))
    weights = float(parameters.decode * getattr(torch, dtype).itemsize)
    for name, values in steps.items():
        if "attention ms" in values and bytes_per_s:
            tell("d. decode", f"{shape.name}: {name}", decode_row(values, weights, bytes_per_s))
    for name, values in stage.told("c. prefill", shape.name).items():
        if "error" not in values and flops_per_s:
            flops = prefill_flops(
                shape, parameters.prefill, int(values["prompts"]), int(values["prompt tokens"])
            )
            tell("d. prefill", f"{shape.name}: {name}", prefill_row(values, flops, flops_per_s))
    for name, values in served_rows(stage.told("c. serve", shape.name), steps).items():
        tell("d. serving beside the engine alone", f"{shape.name}: {name}", values)


def main() -> None:
    stage = Stage()
    found = measure_machine(stage)
    bytes_per_s = max(found.get("copy", 0.0), found.get("read", 0.0))
    for name in ("llama-8b", "opt-125m"):
        if "dtype" in stage.told(STARTS, name).get("steps", {}):
            tell_shape(stage, find_shape(name, tiny=stage.tiny), bytes_per_s, found.get("product", 0.0))
        else:
            stage.warn(
                f"{name}: beside nothing, as this run has no steps of it (--stages roofline,steps,serve)"
            )


if __name__ == "__main__":
    main()
