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
from tests.adapters import make_adapter
from tests.gateway.routing.test_load_scrape import read_load
from tests.integration.attached_vllm import AttachedVllm
from tests.integration.server import VLLM_START_S, Server, in_vllm, total, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPT = "The with statement"
RANK = 8
ALONE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model, prompt, *paths = sys.argv[1:]
llm = LLM(model, dtype="float32", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=64 << 20,
          enable_lora=True, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
adapters = [None, *(LoRARequest(path, number, path) for number, path in enumerate(paths, 1))]
print(json.dumps([llm.generate([prompt], params, lora_request=each)[0].outputs[0].text for each in adapters]))
"""
"""The model's own text and those of adapters, by vLLM without Penstock."""


def write_adapter(directory: Path, model: Path, seed: int) -> None:
    """Random additions to the queries and values of every layer, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    width = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    draw = torch.Generator().manual_seed(seed)
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
def adapters(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters: first, second."""
    directory = tmp_path_factory.mktemp("adapters").resolve()
    for seed, name in enumerate(("first", "second"), 3):
        (directory / name).mkdir()
        write_adapter(directory / name, vllm_model, seed)
    return directory


@pytest.fixture(scope="module", params=[Server, AttachedVllm], ids=["started", "attached"])
def server(
    request: pytest.FixtureRequest,
    vllm_model: Path,
    adapters: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    own = ("--enable-lora", "--max-loras", "2", "--lora-modules", f"tuned={adapters / 'first'}")
    directory = tmp_path_factory.mktemp("lora")
    arguments = in_vllm(vllm_model, "--lora-dir", str(adapters), own=own)
    kind: type[Server] = request.param
    with kind(*arguments, directory=directory, start_s=VLLM_START_S) as running:
        yield running


@pytest.fixture(scope="module")
def texts(vllm_model: Path, adapters: Path) -> dict[str, str]:
    """By vLLM alone: the model's text, and those of the adapters in both directories."""
    command = [sys.executable, "-c", ALONE, str(vllm_model), PROMPT, *map(str, sorted(adapters.iterdir()))]
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CONFIGURE_LOGGING": "0"}
    alone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ, timeout=300)
    found = json.loads(alone.stdout.splitlines()[-1])
    assert len(set(found)) == 3
    return dict(zip(("base", "first", "second"), found, strict=True))


def text_of(server: Server, model: str) -> str:
    text: str = server.complete(PROMPT, model=model, **GREEDY)["choices"][0]["text"]
    return text


def load(server: Server, name: str, path: str, **options: Any) -> httpx.Response:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **options}, timeout=90)


def test_texts_are_those_of_vllm_alone(server: Server, texts: dict[str, str]) -> None:
    for model, text in (("tiny-llama", texts["base"]), ("tuned", texts["first"])):
        reply = server.complete(PROMPT, model=model, **GREEDY)
        assert (reply["model"], reply["choices"][0]["text"]) == (model, text)
        events = [json.loads(each) for each in server.stream(PROMPT, model=model, **GREEDY)[:-1]]
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert {event["model"] for event in events} == {model}


def test_it_is_listed_with_its_parent(server: Server, adapters: Path) -> None:
    card = httpx.get(f"{server.url}/v1/models/tuned", timeout=30).json()
    assert (card["root"], card["parent"]) == (str(adapters / "first"), "tiny-llama")
    unknown = server.post("/v1/completions", {"model": "other", "prompt": PROMPT})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny-llama, tuned" in unknown.text


def test_gateways_see_which_adapter_runs(server: Server) -> None:
    def reported() -> EndpointLoad:
        return read_load(server.get("/metrics").content)

    assert reported().max_adapters == 2
    body = {"model": "tuned", "prompt": PROMPT, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        chunks = reply.iter_bytes()  # which closes the connection when it is gone
        next(chunks)
        text = server.metrics()
    assert read_load(text.encode()).adapters == {"tuned"}
    assert total(text, "penstock:adapter_streams", adapter="tuned", state="running") == 1
    wait_until(lambda: reported().adapters == set(), 60, "the end of the stream that its client has left")


def test_adapters_come_and_go_while_a_stream_runs(server: Server, texts: dict[str, str]) -> None:
    body = {"prompt": PROMPT, "model": "tuned", "stream": True, **GREEDY, "max_tokens": 600}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        assert load(server, "new", "first").status_code == 200
        assert text_of(server, "new") == texts["first"]
        assert "load_inplace" in load(server, "new", "second").text
        assert load(server, "new", "second", load_inplace=True).status_code == 200
        assert text_of(server, "new") == texts["second"]
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "new"}, timeout=90).status_code == 200
        assert server.post("/v1/completions", {"model": "new", "prompt": PROMPT}).status_code == 404
        streamed = [line.removeprefix("data: ") for line in (first, *lines) if line]
    assert streamed[-1] == "[DONE]"
    text = "".join(json.loads(each)["choices"][0]["text"] for each in streamed[:-1])
    assert text.startswith(texts["first"])
    assert text_of(server, "tuned") == texts["first"]


def test_an_adapter_that_does_not_suit_changes_nothing(
    server: Server, adapters: Path, texts: dict[str, str]
) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    make_adapter(adapters / "wide", {layer: (64, 4096)})
    make_adapter(adapters / "other", {"model.layers.0.self_attn.x_proj": (64, 64)})
    for path, message in (("wide", f"layer {layer}: "), ("other", "While loading ")):
        reply = load(server, "new", path)
        assert reply.status_code >= 400
        assert message in reply.text
    assert server.post("/v1/completions", {"model": "new", "prompt": PROMPT}).status_code == 404
    assert text_of(server, "tuned") == texts["first"]


def test_an_engine_that_restarts_has_the_adapters(server: Server, texts: dict[str, str]) -> None:
    assert load(server, "late", "second").status_code == 200
    [engine] = server.children("engine")
    engine.kill()
    engine.wait(60)
    wait_until(lambda: server.get("/ready").status_code == 200, VLLM_START_S, "the engine's restart")
    assert (text_of(server, "tuned"), text_of(server, "late")) == (texts["first"], texts["second"])
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "late"}, timeout=90).status_code == 200


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (("--lora-modules", "a=/a"), "--lora-modules: needs --enable-lora"),
        (
            ("--enable-lora", "--lora-modules", "a=/no/such/adapter"),
            "--lora-modules a (/no/such/adapter): no such",
        ),
    ],
)
def test_what_cannot_be_loaded_ends_the_start(
    vllm_model: Path, tmp_path: Path, own: tuple[str, ...], message: str
) -> None:
    server = Server(*in_vllm(vllm_model, own=own), directory=tmp_path)
    assert server.process.wait(VLLM_START_S) != 0
    server.end()
    assert message in server.log
