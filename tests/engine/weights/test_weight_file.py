"""Files of weights, which may be anything, and the digest that tells them apart."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.weights.tensor_files import TensorFiles
from penstock.engine.weights.weight_file import INDEX, PIECE_BYTES, PIECES, with_digest
from penstock.wire.weights.desired import WeightSource

FILE = "model.safetensors"


def write(path: Path, **tensors: Any) -> WeightSource:
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path)
    return WeightSource(str(path))


def write_bytes(path: Path, dtype: str, shape: list[int], data: bytes) -> WeightSource:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return WeightSource(str(path))


def refused(source: WeightSource, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_digest(source)
    with pytest.raises(ValueError, match=message):
        TensorFiles([source])


def test_tensors_of_a_file(tmp_path: Path) -> None:
    files = TensorFiles([write(tmp_path / FILE, a=np.arange(6, dtype="<f4").reshape(2, 3), b=np.uint8(7))])
    a, b = files.tensors["a"], files.tensors["b"]
    assert (a.shape, a.dtype, a.data.tobytes()) == ((2, 3), "F32", np.arange(6, dtype="<f4").tobytes())
    assert (b.shape, b.dtype, b.data.tobytes()) == ((), "U8", b"\7")
    assert (files.count, files.whole, files.named) == (2, True, set())


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_file_that_was_replaced_has_another_digest(tmp_path: Path, at: int) -> None:
    """Of long tensors, pieces are compared."""
    values = np.zeros((1000, 10), np.float32)
    source = with_digest(write(tmp_path / FILE, a=values, b=np.zeros(3, np.float32)))
    assert len(source.digest) == 32
    assert with_digest(write(tmp_path / FILE, a=values, b=np.zeros(3, np.float32))) == source
    TensorFiles([source])
    start = (values.nbytes - PIECE_BYTES) * at // (PIECES - 1) // 4
    values.reshape(-1)[start + 5] = 1
    write(tmp_path / FILE, a=values, b=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=rf"{FILE} has changed since the update: its digest is"):
        TensorFiles([source])


@pytest.mark.parametrize("other", [{"a": [1.0, 3.0]}, {"b": [1.0, 2.0]}, {"a": [[1.0], [2.0]]}])
def test_values_names_and_shapes_make_the_digest(tmp_path: Path, other: dict[str, Any]) -> None:
    source = with_digest(write(tmp_path / FILE, a=[1.0, 2.0]))
    assert with_digest(write(tmp_path / FILE, **other)) != source


def test_files_of_a_directory_make_the_digest(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", a=[1.0])
    write(tmp_path / "2.safetensors", b=[1.0])
    source = with_digest(WeightSource(str(tmp_path)))
    (tmp_path / "2.safetensors").rename(tmp_path / "3.safetensors")
    assert with_digest(WeightSource(str(tmp_path))) != source


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("dtype", "infinity"),
    [
        ("F64", struct.pack("<d", np.inf)),
        ("F32", struct.pack("<f", -np.inf)),
        ("F16", struct.pack("<e", np.nan)),
        ("BF16", b"\x80\x7f"),
    ],
)
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, dtype: str, infinity: bytes, size: int
) -> None:
    for count in (1, 3):
        source = write_bytes(tmp_path / FILE, dtype, [size * count], bytes(len(infinity)) * size * count)
        assert with_digest(source).digest
    for data in (infinity * size, bytes(len(infinity)) * (3 * size - 1) + infinity):
        source = write_bytes(tmp_path / FILE, dtype, [len(data) // len(infinity)], data)
        with pytest.raises(ValueError, match="a has values that are infinite or not a number"):
            with_digest(source)


def test_types_that_have_no_infinity_are_of_any_bytes(tmp_path: Path) -> None:
    assert with_digest(write_bytes(tmp_path / FILE, "I64", [2], b"\xff" * 16)).digest


# -- what cannot be read


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices_are_not_read(tmp_path: Path, make: Callable[[Path], Any], inside: bool) -> None:
    make(tmp_path / FILE)
    path = tmp_path if inside else tmp_path / FILE
    refused(WeightSource(str(path)), f"{FILE} cannot be read: it is no regular file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its header does not fit in its 0 bytes"),
        (b"x" * 64, "its header does not fit in its 64 bytes"),
        (struct.pack("<Q", 4) + b"{{{{", "header: JSON is malformed"),
        (struct.pack("<Q", 2) + b"{}xx", "its tensors have 0 bytes, and the file has 2 for them"),
    ],
)
def test_other_files(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / FILE).write_bytes(data)
    refused(WeightSource(str(tmp_path / FILE)), f"{FILE} cannot be read: .*{message}")


def test_files_without_tensors_and_directories_without_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tensors"):
        TensorFiles([write_bytes_of_none(tmp_path / FILE)])
    (tmp_path / "empty").mkdir()
    refused(WeightSource(str(tmp_path / "empty")), "empty has no safetensors files")
    refused(WeightSource("relative"), "not an absolute path")
    refused(WeightSource(str(tmp_path / "none")), "none cannot be read: No such file")


def write_bytes_of_none(path: Path) -> WeightSource:
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    return WeightSource(str(path))


def test_a_tensor_is_in_one_file_only(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        write(tmp_path / name, a=[1.0])
    with pytest.raises(ValueError, match=r"^a is in .*1\.safetensors and in .*2\.safetensors$"):
        TensorFiles([WeightSource(str(tmp_path))])


def test_an_index_names_the_files_of_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", a=[1.0])
    write(tmp_path / "2.safetensors", a=[2.0])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors"}}))
    files = TensorFiles([WeightSource(str(tmp_path))])
    assert files.tensors["a"].file.endswith("2.safetensors")


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..", "", 5])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path: Path, name: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(WeightSource(str(tmp_path)), "in its own directory only")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"weight_map": [1]}', r"Expected `object`, got `array` - at `\$\.weight_map`"),
        ('{"weight_map": {"a": %s' % ("[" * 5000), "it is nested too deeply"),
        ("[" * 5000, "Expected `object`, got `array`"),
        ('{"weight_maps": {}}', "Object missing required field `weight_map`"),
        ('{"weight_map": {"a": ["b"]}}', r"it names \['b'\]; it may name files in its own directory only"),
    ],
)
def test_an_index_of_another_shape_is_told_in_words_of_json(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / INDEX).write_text(text)
    refused(WeightSource(str(tmp_path)), f"{INDEX} cannot be read: {why}")


def test_a_header_that_is_nested_too_deeply(tmp_path: Path) -> None:
    header = b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"
    (tmp_path / FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(WeightSource(str(tmp_path / FILE)), "header: it is nested too deeply")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    refused(WeightSource(str(tmp_path)), f"{INDEX} cannot be read")
