"""Stage e: transformers' own continuous batching, on the loads of stage c."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.measuring import STARTS, Stage
from scripts.gpu.serving import Load, loads_of_streams
from scripts.gpu.shapes import Shape, find_shape


def load_model(folder: str, device: str) -> Any:
    """A model of random weights, of the dtype in its config.json; float32 on a CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = torch.float32 if device == "cpu" else config.dtype
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def settings_of(load: Load, *, tiny: bool) -> dict[str, Any]:
    """Arguments of a manager: what generate_batch() gives it, without an end of sequence. Its defaults take
    nearly all memory that is free, which is too much for a rehearsal on a CPU."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}  # as by Penstock's server
    generation = GenerationConfig(
        max_new_tokens=load.output, eos_token_id=-1, pad_token_id=0, use_cache=True, **sampled
    )
    small = {"num_blocks": 16, "max_batch_tokens": 128} if tiny else {}
    return {
        "generation_config": generation,
        "continuous_batching_config": ContinuousBatchingConfig(**small),
        "workload_hints": WorkloadHints(load.prompt, load.output, load.streams),
        "timeout": 5,
    }


def run(model: Any, load: Load, prompts: list[list[int]], seconds: float, *, tiny: bool) -> dict[str, float]:
    """The figures of a load whose requests are all there at once: from the first request to the last result,
    without the start of the manager. Raises RuntimeError when it ends early."""
    started = time.perf_counter()
    with model.continuous_batching_context_manager(**settings_of(load, tiny=tiny)) as manager:
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=load.output)
        tokens = finished = 0
        while finished < len(prompts):
            if time.perf_counter() - began > seconds:
                raise RuntimeError(f"{finished} of {len(prompts)} requests in {seconds:.0f} s")
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its thread has ended")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                finished += 1
                tokens += len(result.generated_tokens)
        taken = time.perf_counter() - began
    return {
        "tokens/s": tokens / taken,
        "requests/s": finished / taken,
        "start and end s": time.perf_counter() - started - taken,
    }


def start(stage: Stage, shape: Shape) -> Any:
    """The model; None when it cannot be made, or its version of transformers has no continuous batching."""
    found = None
    with (
        stage.measurement(STARTS, f"{shape.name}: transformers", 30) as values,
        tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder,
    ):
        began = time.perf_counter()
        model = load_model(shape.write(Path(folder)), stage.device)
        if not hasattr(model, "continuous_batching_context_manager"):
            raise RuntimeError("this version of transformers has no continuous batching")
        values["seconds"] = time.perf_counter() - began
        found = model
    return found


def measure(stage: Stage, shape: Shape, model: Any, load: Load) -> None:
    own = stage.told("c. serve", shape.name)
    with stage.measurement("e. transformers", f"{shape.name}: {load.name}", load.seconds) as values:
        prompts = shape.prompts(load.streams, load.prompt)
        values |= run(model, load, prompts, stage.limit(load.seconds - 6), tiny=stage.tiny)
        if (served := own.get(load.name, {}).get("tokens/s")) is not None:
            values["Penstock tokens/s"] = served
            values["Penstock to transformers"] = served / values["tokens/s"]


def main() -> None:
    stage = Stage("shape")
    shape = find_shape(stage.options.shape, tiny=stage.tiny)
    model = start(stage, shape)
    for load in loads_of_streams(tiny=stage.tiny):
        if model is not None and load.interval == 1:
            measure(stage, shape, model, load)
            if stage.device == "cuda":
                torch.cuda.empty_cache()  # the next manager takes what is free


if __name__ == "__main__":
    main()
