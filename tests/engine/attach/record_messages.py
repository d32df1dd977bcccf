"""Records messages of vLLM's engines, as each version's own definitions encode them, for the tests.

``python -m tests.engine.attach.record_messages DIRECTORY…``, each an unpacked source distribution of
vLLM: rewrites ``tests/data/vllm/messages.json``. Only the definitions in ``vllm/v1/engine/__init__.py`` are
run.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

FILE = Path(__file__).parents[2] / "data" / "vllm" / "messages.json"
PRELUDE = (
    "import enum, time, msgspec\nfrom dataclasses import dataclass, field\n"
    "from typing import *\nfrom collections.abc import *\n"
)
_encode = msgspec.msgpack.Encoder().encode


def definitions(directory: Path) -> dict[str, Any]:
    """The classes of a version's engine messages. Types of other modules are Any."""
    source = (directory / "vllm" / "v1" / "engine" / "__init__.py").read_text()
    tree = ast.parse(source)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names |= {alias.name: Any for alias in node.names if alias.name not in names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= dict.fromkeys(used - names.keys() - set(dir(builtins)), Any)
    names["torch"], names["np"] = SimpleNamespace(Tensor=Any), SimpleNamespace(ndarray=Any)
    names |= dict.fromkeys(("LogprobsLists", "LogprobsTensors", "UtilityResult"), Any)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.Assign):
            exec(compile(ast.Module([node], []), str(directory), "exec"), names)
    return names


def array(values: Any, dtype: str, name: str | None = None) -> tuple[str, tuple[int, ...], Any]:
    """As vLLM encodes a small array; ``name``: torch's name of the dtype of a tensor."""
    made = np.array(values, dtype)
    return name or made.dtype.str, made.shape, msgspec.msgpack.Ext(3, made.tobytes())


def request_id(slot: int) -> str:
    return f"0123abcd{slot:04x}0001"


def outputs(names: dict[str, Any]) -> bytes:
    """A step's message with one output of each kind."""
    output, reason, event = names["EngineCoreOutput"], names["FinishReason"], names["EngineCoreEvent"]
    kinds = names["EngineCoreEventType"]
    error = {"error": {"message": "the KV cache could not be loaded"}}
    scores = (
        array([[7, 3, 9]], "<i4"),
        array([[-0.5, -1.0, -2.0]], "<f4"),
        array([1], "<i4"),
        None,
    )
    prompt_scores = (
        array([[40, 1], [41, 2], [42, 3]], "<i8", "int64"),
        array([[-1.0, -2.0]] * 3, "<f4", "float32"),
        array([5, 6, 7], "<i8", "int64"),
        None,
    )
    prefill = {
        "num_prompt_tokens": 4,
        "num_computed_tokens": 1,
        "num_cached_tokens": 3,
        "num_local_cached_tokens": 3,
        "num_external_cached_tokens": 0,
    }
    records = [
        output(request_id(0), [17]),
        output(request_id(1), [300, 70000]),
        output(request_id(2), [2], finish_reason=reason.STOP),
        output(request_id(3), [5], finish_reason=reason.STOP, stop_reason=5),
        output(
            request_id(4),
            [99],
            finish_reason=reason.LENGTH,
            kv_transfer_params={"remote_block_ids": [1, 2]},
        ),
        output(
            request_id(5),
            [7],
            new_logprobs=scores,
            new_prompt_logprobs_tensors=prompt_scores,
            events=[event(kind, place + 0.5) for place, kind in enumerate(kinds)],
            prefill_stats=prefill,
        ),
        output(
            request_id(6),
            [],
            finish_reason=reason.ERROR,
            **(error if "error" in output.__struct_fields__ else {}),
        ),
    ]
    drafted = {
        "num_spec_tokens": 2,
        "num_drafts": 1,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 1,
        "num_accepted_tokens_per_pos": [1, 0],
    }
    stats = {
        "num_running_reqs": 5,
        "num_waiting_reqs": 2,
        "step_counter": 0,
        "kv_cache_usage": 0.25,
        "prefix_cache_stats": {"reset": False, "requests": 1, "queries": 8, "hits": 3},
        "spec_decoding_stats": drafted,
    }
    return _encode(
        names["EngineCoreOutputs"](
            engine_index=1,
            outputs=records,
            scheduler_stats=stats,
            timestamp=12.5,
            finished_requests={request_id(2)},
        )
    )


def pooled(names: dict[str, Any]) -> bytes:
    """A step's message with a vector, the vectors of three tokens, and an input that failed."""
    output, reason = names["EngineCoreOutput"], names["FinishReason"]
    half = (
        "bfloat16",
        (3, 2),
        msgspec.msgpack.Ext(3, (np.arange(6, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()),
    )
    vectors = [array([0.5, -2.0], "<f4", "float32"), half]
    records = [
        output(request_id(slot), [], pooling_output=vector, finish_reason=reason.STOP)
        for slot, vector in enumerate(vectors)
    ]
    records.append(output(request_id(2), [], finish_reason=reason.ERROR))
    return _encode(names["EngineCoreOutputs"](outputs=records, timestamp=12.5))


def pooling_fields(directory: Path) -> list[str]:
    """The fields of PoolingParams, in their places."""
    tree = ast.parse((directory / "vllm" / "pooling_params.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PoolingParams")
    return [
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def record(directory: Path) -> dict[str, Any]:
    """The messages of one version."""
    names = definitions(directory)
    answer = names["UtilityOutput"](77, None, (None, [1, 2]))
    ready = names["EngineCoreReadyResponse"]
    values = {
        "max_model_len": 2048,
        "num_gpu_blocks": 512,
        "block_size": 16,
        "dp_stats_address": None,
        "dtype": "bfloat16",
        "vllm_version": directory.name.removeprefix("vllm-"),
        "world_size": 1,
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "instance_id": "i",
        "supports_lora": True,
        "max_loras": 2,
    }
    described = ready(**{name: value for name, value in values.items() if name in ready.__annotations__})
    step, answered = (
        outputs(names),
        names["EngineCoreOutputs"](engine_index=1, timestamp=13.5, utility_output=answer),
    )
    return {
        "ready": base64.b64encode(_encode(described)).decode(),
        "outputs": base64.b64encode(step).decode(),
        "pooled": base64.b64encode(pooled(names)).decode(),
        "pooling_fields": pooling_fields(directory),
        "utility": base64.b64encode(_encode(answered)).decode(),
        "output_fields": len(names["EngineCoreOutput"].__struct_fields__),
        "outputs_fields": len(names["EngineCoreOutputs"].__struct_fields__),
    }


def main(directories: list[str]) -> None:
    recorded = {Path(each).name.removeprefix("vllm-"): record(Path(each)) for each in directories}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
