"""Other weights for an attached engine: which calls vLLM gets, and what is refused before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_core import AttachedCore
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.request_ids import RequestIds
from penstock.engine.attach.weight_loader import (
    AttachedWeightLoader,
    ExpectedTransfer,
    read_start_again,
    start_of,
)
from penstock.engine.weights.weight_loader import BrokenWeights
from penstock.wire.vllm.messages import EngineLost, ReadyResponse
from penstock.wire.weights.desired import WeightSource
from tests.engine.attach.test_engine import FakeConnection

TENSORS = {"norm": np.ones([4], np.float32), "head": np.ones([8, 4], np.float32)}
START = "org/model"


class Loading:
    """A loader of the model in ``model/`` of a directory, and what vLLM was asked for."""

    def __init__(self, directory: Path, tensors: dict[str, Any] = TENSORS) -> None:
        self.directory = directory
        (directory / "model").mkdir()
        (directory / "run").mkdir()
        if tensors:
            save_file(tensors, directory / "model" / "model.safetensors")
        self.connection = FakeConnection()
        self.connection.answers["reset_prefix_cache"] = True
        connection: EngineConnection = self.connection  # type: ignore[assignment]
        ready = ReadyResponse(max_model_len=128, vllm_version="0.32.0", max_num_seqs=4)
        self.core = AttachedCore(connection, ready, RequestIds(4), 60)
        self.restored = 0
        self.loader = self.make_loader()

    def make_loader(self) -> AttachedWeightLoader:
        model, links = str(self.directory / "model"), str(self.directory / "run" / "weights-0")
        return AttachedWeightLoader(self.core, model, START, links, self._restore)

    def _restore(self) -> None:
        self.restored += 1

    def file(self, name: str, **tensors: Any) -> str:
        save_file({**TENSORS, **tensors}, self.directory / name)
        return str(self.directory / name)

    def load(self, *sources: WeightSource, drop_cache: bool = False) -> int:
        plan = self.loader.plan(sources)
        return self.loader.load(plan, drop_cache=drop_cache, in_step=False, tick=lambda: None)

    def calls(self) -> list[list[Any]]:
        """The calls since it was asked last."""
        sent, self.connection.sent = self.connection.sent, []
        return [msgspec.msgpack.decode(frames[1])[2:] for frames in sent]


@pytest.fixture
def loading(tmp_path: Path) -> Loading:
    return Loading(tmp_path)


def reads(path: str) -> list[Any]:
    return ["collective_rpc", ["reload_weights", None, [], {"weights_path": path}]]


def labels(version: str) -> list[Any]:
    return ["set_weight_version", [version]]


def test_a_directory_is_read_and_the_start_again(loading: Loading) -> None:
    other = loading.directory / "other"
    other.mkdir()
    save_file(TENSORS, other / "a.safetensors")
    assert loading.load(WeightSource(str(other)), drop_cache=True) == 2
    assert loading.calls() == [
        ["reset_prefix_cache", [True, True]],
        ["reset_encoder_cache", []],
        labels(str(other)),
        reads(str(other)),
    ]
    assert loading.load() == 0
    assert loading.calls() == [labels(START), reads(START), labels("default")]
    assert loading.restored == 2


def test_a_file_is_read_by_a_link_that_stays_as_long_as_it_may_be_read_again(loading: Loading) -> None:
    links = loading.directory / "run" / "weights-0"
    for name in ("a.safetensors", "b.safetensors"):
        path = loading.file(name)
        loading.load(WeightSource(path))
        (link,) = links.glob("*/*.safetensors")
        assert os.readlink(link) == path
        assert loading.calls() == [labels(path), reads(str(link.parent))]
    loading.make_loader()  # of a successor
    assert not links.exists()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"norm": np.ones([5], np.float32)}, r"norm is \[5\], not \[4\]"),
        ({"norm": np.ones([4], np.int8)}, "norm is of type I8, not F32"),
    ],
)
def test_other_shapes_and_types_are_refused(loading: Loading, tensors: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loading.load(WeightSource(loading.file("wrong.safetensors", **tensors)))
    assert loading.calls() == []


def test_other_floats_are_taken(loading: Loading) -> None:
    path = loading.file("half.safetensors", norm=np.ones([4], np.float16))
    assert loading.load(WeightSource(path)) == 2


def test_what_lacks_tensors_or_is_none(loading: Loading) -> None:
    save_file({"norm": TENSORS["norm"]}, loading.directory / "part.safetensors")
    (loading.directory / "text").write_text("none")
    (loading.directory / "empty").mkdir()
    for name, reason in (
        ("part.safetensors", "no weights for head; vLLM's engine takes whole models"),
        ("text", "text cannot be read: "),
        ("empty", "empty has no safetensors files"),
        ("gone", "gone cannot be read: No such file"),
    ):
        with pytest.raises(ValueError, match=reason):
            loading.load(WeightSource(str(loading.directory / name)))
    assert loading.calls() == []


def test_parts_are_refused(loading: Loading) -> None:
    path = loading.file("a.safetensors")
    whole = WeightSource(path)
    for sources in ([WeightSource(path, ["norm"])], [WeightSource(path, part=True)], [whole, whole]):
        with pytest.raises(ValueError, match="whole models, each from one path"):
            loading.load(*sources)
    assert loading.calls() == []


def test_without_files_here_all_is_left_to_vllm(tmp_path: Path) -> None:
    loading = Loading(tmp_path, {})
    path = loading.file("a.safetensors", more=np.ones([1], np.float32))
    assert loading.load(WeightSource(path)) == 3


def test_a_cache_that_cannot_be_emptied_changes_nothing(loading: Loading) -> None:
    loading.connection.answers["reset_prefix_cache"] = False
    with pytest.raises(ValueError, match="cannot empty its prefix cache"):
        loading.load(WeightSource(loading.file("a.safetensors")), drop_cache=True)
    assert loading.calls() == [["reset_prefix_cache", [True, True]]]


def test_what_vllm_refuses_is_followed_by_what_was_there(loading: Loading) -> None:
    before = str(loading.directory / "before")
    os.mkdir(before)
    save_file(TENSORS, Path(before) / "a.safetensors")
    loading.load(WeightSource(before))
    loading.calls()
    refused = loading.file("refused.safetensors")
    loading.connection.failing = {"collective_rpc": ["no such layer"]}
    with pytest.raises(ValueError, match=r"^vLLM: no such layer$"):
        loading.load(WeightSource(refused))
    assert loading.calls()[2:] == [reads(before)]
    assert list((loading.directory / "run" / "weights-0").iterdir()) == []


def test_a_vllm_without_versions_keeps_its_weights(loading: Loading) -> None:
    lacks = "Call failed: 'EngineCoreProc' object has no attribute 'set_weight_version'"
    loading.connection.answers["set_weight_version"] = RuntimeError(lacks)
    with pytest.raises(ValueError, match=r"^vLLM 0\.32\.0 has no set_weight_version$"):
        loading.load(WeightSource(loading.file("a.safetensors")))
    assert [method for method, _ in loading.calls()] == ["set_weight_version"]


def test_an_engine_whose_weights_are_lost_is_broken(loading: Loading) -> None:
    loading.connection.answers["collective_rpc"] = RuntimeError("no memory")
    with pytest.raises(BrokenWeights, match="lost as well: vLLM: no memory"):
        loading.load(WeightSource(loading.file("a.safetensors")))


SENT, INFO = WeightSource("transfer:7"), {"names": ["norm", "head"]}


def workers(method: str, **arguments: Any) -> list[Any]:
    return ["collective_rpc", [method, None, [], arguments]]


def test_a_transfer_is_received_once(loading: Loading) -> None:
    with pytest.raises(ValueError, match="a trainer sends these weights, and only once"):
        loading.load(SENT)
    loading.loader.expect(ExpectedTransfer(SENT.path, INFO, 5.0))
    loading.load(SENT, drop_cache=True)
    assert loading.calls() == [
        ["reset_prefix_cache", [True, True]],
        ["reset_encoder_cache", []],
        labels(SENT.path),
        workers("start_weight_update"),
        workers("update_weights", update_info=INFO),
        workers("finish_weight_update"),
    ]
    assert (loading.loader.is_sent, loading.restored) == (True, 1)
    with pytest.raises(ValueError, match="a trainer sends these weights, and only once"):
        loading.load(SENT)
    loading.load()
    assert not loading.loader.is_sent


def test_another_transfer_than_the_expected_one_is_refused(loading: Loading) -> None:
    loading.loader.expect(ExpectedTransfer("transfer:8", INFO, 5.0))
    with pytest.raises(ValueError, match="under another weight_version"):
        loading.load(SENT)
    assert loading.calls() == []


def test_a_transfer_that_does_not_begin_changes_nothing(loading: Loading) -> None:
    loading.loader.expect(ExpectedTransfer(SENT.path, INFO, 5.0))
    loading.connection.failing = {"collective_rpc": ["Weight transfer not configured."]}
    with pytest.raises(ValueError, match=r"^Weight transfer not configured\.$"):
        loading.load(SENT)
    assert loading.calls() == [labels(SENT.path), workers("start_weight_update")]


def test_a_transfer_that_fails_is_followed_by_what_can_be_read(loading: Loading) -> None:
    path = loading.file("a.safetensors")
    for source in (WeightSource(path), SENT):
        loading.loader.expect(ExpectedTransfer(SENT.path, INFO, 5.0))
        loading.load(source)
        loading.calls()
        loading.loader.expect(ExpectedTransfer("transfer:8", INFO, 5.0))
        loading.connection.failing = {"collective_rpc": ["", "the trainer is gone"]}
        error: type[Exception] = BrokenWeights if source is SENT else ValueError
        with pytest.raises(error, match="only once" if source is SENT else "^vLLM: the trainer is gone$"):
            loading.load(WeightSource("transfer:8"))
        read_again = loading.calls()[3:]
        assert [call[1][0] for call in read_again] == ([] if source is SENT else ["reload_weights"])


def test_asleep(loading: Loading) -> None:
    loading.core.is_asleep = True
    with pytest.raises(ValueError, match="wake it up first"):
        loading.load(WeightSource(loading.file("a.safetensors")))
    with pytest.raises(ValueError, match="wake it up first"):
        loading.loader.checksum()


def test_checksums(loading: Loading) -> None:
    loading.connection.answers["compute_weight_checksums"] = [{"dp0:tp0:a": "1", "dp0:tp0:b": "2"}]
    first = loading.loader.checksum()
    assert len(first) == 64
    loading.connection.answers["compute_weight_checksums"] = [{"dp1:tp0:b": "2", "dp1:tp0:a": "1"}]
    assert loading.loader.checksum() == first
    loading.connection.answers["compute_weight_checksums"] = [{"dp0:tp0:a": "1", "dp0:tp0:b": "3"}]
    assert loading.loader.checksum() != first
    lacks = "Call failed: 'EngineCoreProc' object has no attribute 'compute_weight_checksums'"
    loading.connection.answers["compute_weight_checksums"] = RuntimeError(lacks)
    with pytest.raises(ValueError, match=r"^vLLM 0\.32\.0 has no compute_weight_checksums$"):
        loading.loader.checksum()


@pytest.mark.parametrize("label", ["default", None, RuntimeError("it has none")])
def test_an_engine_with_the_weights_of_its_start_is_taken_over_as_it_is(loading: Loading, label: Any) -> None:
    loading.connection.answers["get_weight_version"] = label
    read_start_again(loading.core, START, lambda: None)
    assert loading.calls() == [["get_weight_version", []]]


def test_an_engine_with_other_weights_is_brought_back(loading: Loading) -> None:
    loading.connection.answers["get_weight_version"] = "/dev/shm/step-7"
    read_start_again(loading.core, START, lambda: None)
    assert loading.calls()[1:] == [reads(START), labels("default")]
    with pytest.raises(EngineLost, match="restart it: the weights that vLLM was started with"):
        read_start_again(loading.core, None, lambda: None)
    loading.connection.answers["collective_rpc"] = RuntimeError("no such file")
    with pytest.raises(EngineLost, match="restart it: no such file"):
        read_start_again(loading.core, START, lambda: None)


def test_where_the_weights_of_the_start_are(tmp_path: Path) -> None:
    def of(**options: Any) -> str | None:
        return start_of(ServeConfig(**options), "/cache/model")

    assert of(model=START) == "/cache/model"
    assert of(model=START, attach="127.0.0.1:0") == START
    assert of(model=START, attach="127.0.0.1:0", revision="v2") is None
    assert of(model=str(tmp_path), attach="127.0.0.1:0", revision="v2") == str(tmp_path)
