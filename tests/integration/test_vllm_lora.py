"""Adapters in vLLM's engine, behind a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.routing.endpoint import EndpointLoad
from tests.gateway.routing.test_load_scrape import read_load
from tests.integration.server import VLLM_START_S, Server, in_vllm, total, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPT = "The with statement"
RANK = 8
ALONE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model, adapter, prompt = sys.argv[1:]
llm = LLM(model, dtype="float32", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=64 << 20,
          enable_lora=True, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
adapters = None, LoRARequest("tuned", 1, adapter)
print(json.dumps([llm.generate([prompt], params, lora_request=each)[0].outputs[0].text for each in adapters]))
"""
"""The model's own text and the adapter's, by vLLM without Penstock."""


def write_adapter(directory: Path, model: Path) -> None:
    """Random additions to the queries and values of every layer, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    width = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in width.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = 0.3 * torch.randn(RANK, hidden, generator=draw)
            tensors[f"{stem}.lora_B.weight"] = 0.3 * torch.randn(size, RANK, generator=draw)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": list(width), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def adapter(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    write_adapter(directory, vllm_model)
    return directory


@pytest.fixture(scope="module")
def server(vllm_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own = ("--enable-lora", "--lora-modules", f"tuned={adapter}")
    directory = tmp_path_factory.mktemp("lora")
    with Server(*in_vllm(vllm_model, own=own), directory=directory, start_s=VLLM_START_S) as running:
        yield running


def test_texts_are_those_of_vllm_alone(server: Server, vllm_model: Path, adapter: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(vllm_model), str(adapter), PROMPT]
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CONFIGURE_LOGGING": "0"}
    alone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ, timeout=300)
    expected = json.loads(alone.stdout.splitlines()[-1])
    assert expected[0] != expected[1]
    for model, text in zip(("tiny-llama", "tuned"), expected, strict=True):
        reply = server.complete(PROMPT, model=model, **GREEDY)
        assert (reply["model"], reply["choices"][0]["text"]) == (model, text)
        events = [json.loads(each) for each in server.stream(PROMPT, model=model, **GREEDY)[:-1]]
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert {event["model"] for event in events} == {model}


def test_it_is_listed_with_its_parent(server: Server, adapter: Path) -> None:
    card = httpx.get(f"{server.url}/v1/models/tuned", timeout=30).json()
    assert (card["root"], card["parent"]) == (str(adapter), "tiny-llama")
    unknown = server.post("/v1/completions", {"model": "other", "prompt": PROMPT})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny-llama, tuned" in unknown.text


def test_gateways_see_which_adapter_runs(server: Server) -> None:
    def load() -> EndpointLoad:
        return read_load(server.get("/metrics").content)

    assert load().max_adapters == 1
    body = {"model": "tuned", "prompt": PROMPT, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        chunks = reply.iter_bytes()  # which closes the connection when it is gone
        next(chunks)
        text = server.get("/metrics").text
    assert read_load(text.encode()).adapters == {"tuned"}
    assert total(text, "penstock:adapter_streams", adapter="tuned", state="running") == 1
    wait_until(lambda: load().adapters == set(), 60, "the end of the stream that its client has left")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (("--lora-modules", "a=/a"), "--lora-modules needs vLLM's --enable-lora"),
        (("--enable-lora", "--lora-modules", "a=/no/such/adapter"), "--lora-modules a=/no/such/adapter: "),
    ],
)
def test_what_cannot_be_loaded_ends_the_start(
    vllm_model: Path, tmp_path: Path, own: tuple[str, ...], message: str
) -> None:
    server = Server(*in_vllm(vllm_model, own=own), directory=tmp_path)
    assert server.process.wait(VLLM_START_S) != 0
    server.end()
    assert message in server.log
