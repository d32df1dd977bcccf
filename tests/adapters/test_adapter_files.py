"""Adapters' files, good ones and hostile ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.adapters import adapter_directory
from penstock.adapters.adapter_files import (
    MAX_CONFIG_BYTES,
    AdapterFiles,
    check_adapter,
    describe_adapter,
    read_adapter,
)
from penstock.adapters.errors import AdapterError
from penstock.wire.messages import LoraInfo
from tests.adapters import MODULES, PREFIX, make_adapter, safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
MODEL = LoraInfo(4, 16, 8, MODULES)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def describe(path: Path) -> AdapterFiles:
    return describe_adapter(str(path))


def write_weights(adapter: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Weights of float32 zeros."""
    tensors = {name: ("F32", shape, bytes(4 * int(np.prod(shape)))) for name, shape in shapes.items()}
    (adapter / WEIGHTS).write_bytes(safetensors(tensors))


# -- what is read


def test_layers_shapes_scaling_and_digest(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", ranks={Q: 4}, base_model="org/base")
    files = describe(path)
    assert (files.rank, set(files.modules)) == (8, set(MODULES))
    pair = files.modules[Q]
    assert (pair.a.shape, pair.b.shape, pair.rank, pair.scaling) == ((4, 16), (16, 4), 4, 16 / 4)
    assert re.fullmatch("[0-9a-f]{64}", files.digest)
    assert describe(path) == files


@pytest.mark.parametrize(("dtype", "item"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_the_bytes_are_the_weights(tmp_path: Path, dtype: str, item: int) -> None:
    path = make_adapter(tmp_path / "a", {Q: (16, 16)}, rank=2, dtype=dtype)
    files = describe(path)
    read = read_adapter(str(path), files.digest)
    assert read.files == files
    assert len(read.data) == files.size == 2 * 2 * 16 * item
    a = files.modules[Q].a
    assert a.dtype == dtype
    stored = (path / WEIGHTS).read_bytes()
    assert stored.endswith(read.data)
    if dtype == "F32":
        expected = np.random.default_rng(0).normal(0, 0.1, (2, 16)).astype("<f4")
        assert (np.frombuffer(read.data[a.start : a.end], "<f4").reshape(a.shape) == expected).all()


def test_weights_of_many_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_adapter(tmp_path / "a")
    whole = read_adapter(str(path), describe(path).digest)
    monkeypatch.setattr(adapter_directory, "READ_BYTES", 100)
    monkeypatch.setattr("penstock.adapters.adapter_files.READ_BYTES", 100)
    assert describe(path) == whole.files
    assert read_adapter(str(path), whole.files.digest) == whole


def test_the_digest_is_of_all_bytes_of_both_files(tmp_path: Path) -> None:
    paths = [
        make_adapter(tmp_path / "a"),
        make_adapter(tmp_path / "b", seed=1),
        make_adapter(tmp_path / "c", training="x"),
        make_adapter(tmp_path / "d", dtype="F16"),
    ]
    assert len({describe(path).digest for path in paths}) == 4


def test_names_without_peft_s_prefix(adapter: Path) -> None:
    write_weights(adapter, {f"{Q}.lora_A.weight": (8, 4), f"{Q}.lora_B.weight": (4, 8)})
    assert list(describe(adapter).modules) == [Q]


@pytest.mark.parametrize("part", ["model.language_model.", "language_model.model."])
def test_names_of_a_text_part_are_those_of_a_model_of_text_alone(adapter: Path, part: str) -> None:
    own = f"{PREFIX}{part}{Q.removeprefix('model.')}"
    write_weights(adapter, {f"{own}.lora_A.weight": (8, 4), f"{own}.lora_B.weight": (4, 8)})
    assert list(describe(adapter).modules) == [Q]


def test_other_files_may_lie_there(adapter: Path) -> None:
    digest = describe(adapter).digest
    (adapter / "README.md").write_text("x")
    (adapter / "adapter_model.bin").write_bytes(b"x")
    (adapter / "link").symlink_to("/etc/passwd")
    assert describe(adapter).digest == digest


# -- directories and files that are not what they should be


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, "it does not exist"),
        (link, "it is a symbolic link; it must be a regular file"),
        (dangling_link, "it is a symbolic link"),
        (pipe, "it is not a regular file"),
        (directory, "it is not a regular file"),
    ],
)
def test_only_regular_files_are_read(
    adapter: Path, name: str, change: Callable[[Path], None], message: str
) -> None:
    digest = describe(adapter).digest
    change(adapter / name)
    with pytest.raises(AdapterError, match=f"{name}: {message}"):
        describe(adapter)
    with pytest.raises(AdapterError, match=f"{name}: {message}"):
        read_adapter(str(adapter), digest)


def test_pickled_weights_are_refused_with_the_way_out(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: pickled weights are not read; convert them"):
        describe(adapter)


def test_the_directory_itself(adapter: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none", "none: it does not exist"),
        (adapter / CONFIG, "it is not a directory"),
    ):
        with pytest.raises(AdapterError, match=message):
            describe(path)
    for text in ("adapter", "", "/a\0b", "/" + "a" * 300, "/a" * 3000):
        with pytest.raises(AdapterError):
            describe_adapter(text)
        with pytest.raises(AdapterError):
            read_adapter(text, "")


def test_a_linked_directory_is_described_by_its_real_path_alone(adapter: Path, tmp_path: Path) -> None:
    digest = describe(adapter).digest
    other = tmp_path / "other"
    other.symlink_to(tmp_path)
    with pytest.raises(AdapterError, match="a part of it is a symbolic link"):
        describe(other / "adapter")
    assert read_adapter(str(other / "adapter"), digest).files.digest == digest


def test_large_configurations_are_refused(adapter: Path) -> None:
    with (adapter / CONFIG).open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(AdapterError, match=f"{CONFIG}: it has 4194305 bytes; the maximum is 4194304"):
        describe(adapter)


def test_large_weights_are_refused_before_they_are_read(adapter: Path) -> None:
    with (adapter / WEIGHTS).open("r+b") as file:
        file.truncate((1 << 34) + 1)  # a hole: it takes no room
    with pytest.raises(AdapterError, match=f"{WEIGHTS}: it has 17179869185 bytes"):
        describe(adapter)


# -- files that change


def test_other_files_than_those_of_the_digest(adapter: Path) -> None:
    old = describe(adapter)
    make_adapter(adapter, seed=1)
    with pytest.raises(AdapterError, match=f"its files have changed: their digest is .*, not {old.digest}"):
        read_adapter(str(adapter), old.digest)


@pytest.mark.parametrize("grow", [False, True])
def test_a_file_that_changes_its_size_while_it_is_read(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, grow: bool
) -> None:
    digest = describe(adapter).digest
    weights = adapter / WEIGHTS
    readv = os.readv

    def change(fd: int, buffers: list[memoryview]) -> int:
        if weights.samefile(f"/proc/self/fd/{fd}") and weights.stat().st_size == size:
            os.truncate(weights, size + (4 if grow else -4))
        return readv(fd, buffers)

    size = weights.stat().st_size
    monkeypatch.setattr(os, "readv", change)
    with pytest.raises(AdapterError, match=f"{WEIGHTS}: it has changed while it was read"):
        read_adapter(str(adapter), digest)


def test_a_directory_that_is_replaced_while_it_is_read(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files are of the one that was opened."""
    other = make_adapter(tmp_path / "other", seed=1)
    expected = describe(adapter)
    opened = os.open

    def replace(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == WEIGHTS and adapter.exists():
            adapter.rename(tmp_path / "old")
            shutil.copytree(other, adapter)
        return opened(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", replace)
    assert read_adapter(str(adapter), expected.digest).files == expected
    monkeypatch.undo()
    assert describe(adapter).digest == describe(other).digest


# -- weights that are not those of an adapter

A = (8, 16)
B = (16, 8)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, f"{WEIGHTS}: it has no tensors"),
        ({f"{PREFIX}{Q}.lora_A.weight": A}, f"layer {Q}: it has no lora_B.weight"),
        ({f"{PREFIX}{Q}.lora_B.weight": B}, f"layer {Q}: it has no lora_A.weight"),
        (
            {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": (16, 4)},
            r"the shapes of lora_A, \[8, 16\], and lora_B, \[16, 4\], differ in rank",
        ),
        (
            {f"{Q}.lora_A.weight": (4, 16), f"{Q}.lora_B.weight": (16, 4)},
            f"layer {Q}: its rank is 4; adapter_config.json says 8",
        ),
        ({f"{Q}.lora_A.weight": (8, 16, 1)}, r"its shape is \[8, 16, 1\]; a matrix is needed"),
        ({f"{Q}.lora_A.weight": (0, 16)}, r"its shape is \[0, 16\]; a matrix is needed"),
        (
            {f"{PREFIX}{Q}.lora_A.weight": A, f"{Q}.lora_A.weight": A},
            "its layer has another lora_A",
        ),
        ({f"{Q}.lora_magnitude_vector.weight": (16,)}, "lora_magnitude_vector.*: DoRA is not supported"),
        ({"model.embed_tokens.lora_embedding_A": A}, "adapters of embeddings are not supported"),
        ({f"{Q}.lora_B.bias": (16,)}, "biases are not supported"),
        ({"score.modules_to_save.weight": A}, "modules_to_save is not supported"),
        ({"m.base_layer.lora_A.weight": A}, "weights of the base model are not supported"),
        ({"model.lm_head.weight": A}, "tensor model.lm_head.weight: it is no lora_A or lora_B"),
        ({f"{Q}.lora_A.default.weight": A}, "it is no lora_A or lora_B"),
        ({".lora_A.weight": A}, "it is no lora_A or lora_B"),
    ],
)
def test_other_weights_are_refused_by_name(
    adapter: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    write_weights(adapter, shapes)
    with pytest.raises(AdapterError, match=message):
        describe(adapter)


def test_a_configuration_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"{CONFIG}: use_dora is not supported; it is True"):
        describe(make_adapter(tmp_path / "a", use_dora=True))


# -- whether it suits the model


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (LoraInfo(1, 7, 1), "its rank is 8; --max-lora-rank is 7"),
        (LoraInfo(1, 8, 1, {"x": (16, 16)}), "the model has no such layer"),
        (
            LoraInfo(1, 8, 1, MODULES | {Q: (16, 32)}),
            rf"layer {Q}: the shape of lora_A is \[8, 16\]; the model needs \[8, 32\]",
        ),
        (
            LoraInfo(1, 8, 1, MODULES | {Q: (32, 16)}),
            r"the shape of lora_B is \[16, 8\]; the model needs \[32, 8\]",
        ),
    ],
)
def test_what_does_not_suit_the_model_is_named(adapter: Path, info: LoraInfo, message: str) -> None:
    files = describe(adapter)
    with pytest.raises(AdapterError, match=message):
        check_adapter(files, info)
    with pytest.raises(AdapterError, match=message):
        describe_adapter(str(adapter), info)
    with pytest.raises(AdapterError, match=message):
        read_adapter(str(adapter), files.digest, info)


def test_what_suits_the_model(adapter: Path) -> None:
    files = describe(adapter)
    for info in (MODEL, LoraInfo(1, 8, 1)):
        check_adapter(files, info)
        assert describe_adapter(str(adapter), info) == files
        assert read_adapter(str(adapter), files.digest, info).files == files


def test_json_of_the_generator_is_what_peft_writes(adapter: Path) -> None:
    fields = json.loads((adapter / CONFIG).read_text())
    assert (fields["peft_type"], fields["r"], fields["lora_alpha"]) == ("LORA", 8, 16)


AS_NOBODY = """
import os, sys
from penstock.adapters.adapter_files import describe_adapter
if not os.getuid():
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(describe_adapter(sys.argv[1]).digest)
try:
    os.listdir(sys.argv[2])
except PermissionError:
    print("unreadable")
"""


def test_directories_on_the_way_need_not_be_readable() -> None:
    """As /home with the mode 0711."""
    with tempfile.TemporaryDirectory() as above:
        adapter = make_adapter(Path(above) / "adapter")
        for path in (adapter, *adapter.iterdir()):
            path.chmod(0o755)
        os.chmod(above, 0o711 if os.getuid() == 0 else 0o311)
        try:
            ran = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, str(adapter), above],
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            os.chmod(above, 0o755)
        assert ran.stdout.split() == [describe(adapter).digest, "unreadable"], ran.stderr
