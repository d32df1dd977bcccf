"""Weights that the workers of vLLM's engines receive from a trainer. NCCL and CUDA IPC need GPUs: a plugin of
vLLM's, which reads a file, takes their place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.attached_vllm import AttachedVllm
from tests.integration.clients import texts_of
from tests.integration.control import call, of_all
from tests.integration.server import VLLM_START_S, in_vllm, wait_until
from tests.integration.weight_marks import update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLUGIN = """
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


def register():
    if "file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("file", FileTransfer)


@dataclass
class FileInit(base.WeightTransferInitInfo):
    directory: str


@dataclass
class FileUpdate(base.WeightTransferUpdateInfo):
    file: str
    names: list


class FileTransfer(base.WeightTransferEngine):
    init_info_cls = FileInit
    update_info_cls = FileUpdate
    directory = None

    def init_transfer_engine(self, init_info):
        self.directory = Path(init_info.directory)

    def start_weight_update(self):
        if self.directory is None:
            raise RuntimeError("no trainer was joined")
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        tensors = load_file(self.directory / update_info.file)
        self.model.load_weights([(name, tensors[name]) for name in update_info.names])

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass
"""
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
BODIES = [GREEDY | {"prompt": f"{place}: The with statement"} for place in range(8)]
TOLD = GREEDY | {"prompt": "x", "return_weight_versions": True}


@pytest.fixture(scope="module")
def pair(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedVllm]:
    """Two engines with the plugin."""
    directory = tmp_path_factory.mktemp("transfer")
    (directory / "file_transfer.py").write_text(PLUGIN)
    described = directory / "file_transfer-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: file-transfer\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nfile = file_transfer:register\n")
    environ = os.environ | {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}
    own = ("--weight-transfer-config", '{"backend": "file"}')
    arguments = in_vllm(vllm_model, "--data-parallel-size", "2", own=own)
    with AttachedVllm(*arguments, directory=directory, environ=environ) as running:
        up(running, 2)
        yield running


def up(server: AttachedVllm, engines: int) -> None:
    wait_until(
        lambda: server.metric("penstock:engine_up") == engines, VLLM_START_S, f"{engines} engines being up"
    )


def test_what_a_trainer_sends_is_received_once_by_each_engine(
    pair: AttachedVllm, vllm_model: Path, tmp_path: Path
) -> None:
    files: Any = pytest.importorskip("safetensors.torch")
    start = files.load_file(vllm_model / "model.safetensors")
    weights = {name: tensor.flip(0).contiguous() for name, tensor in start.items()}
    files.save_file(weights, tmp_path / "sent.safetensors")
    files.save_file(weights, tmp_path / "kept.safetensors")
    sent = {"file": "sent.safetensors", "names": [*weights]}
    before = texts_of(pair.url, BODIES)

    with httpx.Client(base_url=pair.url, timeout=300) as client:

        def transfer(version: str, info: Any) -> dict[str, Any]:
            return call(client, "/update_weights", {"weight_version": version, "update_info": info})

        def versions() -> list[str]:
            return [each["weight_version"] for each in client.get("/weight_version").json()["engines"]]

        early = transfer("v1", sent)
        assert (early["status"], early["outcome"]) == (502, "aborted"), early
        assert "no trainer was joined" in early["error"]["message"]
        wrong = call(client, "/init_weight_transfer_engine", {"init_info": {"place": "x"}})
        assert (wrong["status"], wrong["failed"]) == (502, [0, 1]), wrong
        assert "Invalid init_info for FileTransfer" in wrong["engines"][0]["error"]
        joined = {"init_info": {"directory": str(tmp_path)}}
        assert call(client, "/init_weight_transfer_engine", joined, "join")["status"] == 200
        repeated = call(client, "/init_weight_transfer_engine", joined, "join")
        assert of_all(repeated, "repeated") == [True, True]

        lacking = transfer("v1", sent | {"file": "lacking.safetensors"})
        assert (lacking["status"], lacking["outcome"]) == (502, "aborted"), lacking
        assert versions() == ["default"] * 2
        assert texts_of(pair.url, BODIES) == before

        updated = transfer("v1", sent)
        assert (updated["status"], updated["weight_version"]) == (200, "v1"), updated
        assert [result["version"] for result in of_all(updated, "result")] == ["v1"] * 2
        after = texts_of(pair.url, BODIES)
        assert after != before
        assert client.get("/weights_checksum").json()["equal"] is True
        told = client.post("/v1/completions", json=TOLD).json()["choices"][0]["weight_versions"]
        assert told == [{"start": 0, "end": TOLD["max_tokens"], "version": "v1"}]
        assert of_all(transfer("v1", sent), "repeated") == [True, True]

        by_path = update(client, str(tmp_path / "kept.safetensors"), "v2")
        assert by_path["status"] == 200, by_path
        assert texts_of(pair.url, BODIES) == after


def test_an_engine_that_is_killed_gets_no_streams_before_weights_that_it_can_have(
    pair: AttachedVllm, vllm_model: Path, tmp_path: Path
) -> None:
    """The trainer does not send the same again."""
    files: Any = pytest.importorskip("safetensors.torch")
    start = files.load_file(vllm_model / "model.safetensors")
    files.save_file(start, tmp_path / "sent.safetensors")
    with httpx.Client(base_url=pair.url, timeout=300) as client:
        joined = {"init_info": {"directory": str(tmp_path)}}
        assert call(client, "/init_weight_transfer_engine", joined)["status"] == 200
        info = {"file": "sent.safetensors", "names": [*start]}
        assert call(client, "/update_weights", {"weight_version": "v3", "update_info": info})["status"] == 200
        expected = texts_of(pair.url, BODIES)
        program: Any = pair.engines[-1].args
        pair.kill_engine(-1)
        up(pair, 1)
        pair.start_engine(["vllm", *program[2:]])
        wait_until(lambda: "only once" in json.dumps(errors(client)), VLLM_START_S, "the error")
        assert texts_of(pair.url, BODIES) == expected
        by_path = update(client, str(tmp_path / "sent.safetensors"), "v4", query="?timeout=300")
        assert by_path["status"] == 200, by_path
        assert errors(client) == [None, None]


def errors(client: httpx.Client) -> list[str | None]:
    return [engine["error"] for engine in client.get("/weight_version").json()["engines"]]
