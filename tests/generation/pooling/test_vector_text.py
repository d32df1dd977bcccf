"""Vectors as JSON, base64 and binary bodies, read by other programs' readers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.generation.pooling import vector_text as text
from penstock.generation.pooling.plan import PooledInputs
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError
from penstock.wire.arrays import F32, I32


def pooled(values: F32, tokens: list[int] | None = None) -> PooledInputs:
    """``tokens``: of each input, which has a vector per token."""
    lengths = np.array([3] * len(values) if tokens is None else tokens, np.int32)
    return PooledInputs(values, lengths, tokens is not None, TokenUsage(int(lengths.sum()), 0, None))


def random_values(*shape: int) -> F32:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def whole(*parts: bytes | Iterator[bytes]) -> bytes:
    return b"".join(text.json_pieces(*parts))


def bits(values: object) -> list[int]:
    """Of numbers read as float64, rounded to float32."""
    return np.array(values, np.float64).astype(np.float32).view(np.uint32).ravel().tolist()


def _any_floats() -> F32:
    drawn = np.random.default_rng(1).integers(0, 1 << 32, 30_000, dtype=np.uint32)
    denormal = drawn[:2000] & np.uint32(0x807FFFFF)
    edges = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x00800000, 0x4B800000, 0x3F800000], np.uint32)
    found = np.concatenate((drawn, denormal, edges)).view(np.float32)
    kept: F32 = found[np.isfinite(found)]
    return kept


def test_json_has_the_shortest_form_that_reads_back() -> None:
    values = _any_floats()
    array = whole(b"[", text.float_items(pooled(values[None])), b"]")
    [row] = json.loads(array)
    assert bits(row) == bits(values)
    shown = array[2:-2].decode().split(",")
    longer = [each for each, value in zip(shown, values, strict=True) if _digits(each) != _digits(str(value))]
    assert longer == []


def _digits(number: str) -> int:
    return len(number.partition("e")[0].replace(".", "").strip("-0"))


@pytest.mark.parametrize("width", [1, 8, 1024, text.MAX_PART_VALUES + 8])
@pytest.mark.parametrize("tokens", [None, [1, 3, 1]])
def test_items_are_an_array_however_large_they_are(width: int, tokens: list[int] | None) -> None:
    values = random_values(sum(tokens or [1, 1, 1]), width)
    inputs = pooled(values, tokens)
    expected = [inputs.of_input(index) for index in range(3)]

    def before(index: int) -> bytes:
        return b'{"index":%d,"embedding":' % index

    for items in (text.float_items(inputs, before, b"}"), text.float_items(inputs)):
        found = json.loads(whole(b"[", items, b"]"))
        rows = [each["embedding"] if isinstance(each, dict) else each for each in found]
        assert [bits(each) for each in rows] == [bits(each) for each in expected]
        assert [np.shape(each) for each in rows] == [each.shape for each in expected]
    found = json.loads(whole(b"[", text.base64_items(inputs, before, b"}"), b"]"))
    assert [each["index"] for each in found] == [0, 1, 2]
    for each, rows in zip(found, expected, strict=True):
        assert base64.b64decode(each["embedding"], validate=True) == rows.tobytes()
    for kind in text.INTEGERS:
        integers = json.loads(whole(b"[", text.integer_items(inputs, kind), b"]"))
        assert [np.shape(each)[:-1] for each in integers] == [each.shape[:-1] for each in expected]


def test_pieces_and_parts_are_bounded() -> None:
    for values in (random_values(2000, 1), random_values(500, 1024), random_values(2, 300_000)):
        parts = list(text.float_items(pooled(values)))
        assert max(map(len, parts)) < 16 * text.MAX_PART_VALUES
        pieces = list(text.json_pieces(b"[", iter(parts), b"]"))
        assert max(map(len, pieces)) < (text.JSON_PIECE_BYTES) + 16 * text.MAX_PART_VALUES
        assert len(pieces) >= len(parts) // text.MAX_PIECE_PARTS
        bounds = len(parts) // text.MAX_PIECE_PARTS + sum(map(len, parts)) // (text.JSON_PIECE_BYTES)
        assert len(pieces) <= 2 + bounds
        assert len(json.loads(b"".join(pieces))) == len(values)


def test_a_matrix_of_any_layout_is_printed() -> None:
    values = np.asfortranarray(random_values(4, 6))
    rows = json.loads(whole(b"[", text.float_items(pooled(values)), b"]"))
    assert bits(rows) == values.view(np.uint32).ravel(order="C").tolist() == bits(values)
    body = text.octet_stream(pooled(values[:, ::2]), "m", "r")
    assert b"".join(body.pieces) == np.ascontiguousarray(values[:, ::2]).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_json_is_refused_for_what_it_does_not_have(bad: float) -> None:
    values = random_values(3, 4)
    values[1, 2] = bad
    makers: list[Callable[[], object]] = [
        lambda: text.float_items(pooled(values)),
        lambda: text.integer_items(pooled(values), "int8"),
        lambda: text.number_texts(values[1]),
    ]
    for make in makers:
        with pytest.raises(ApiError, match="returned 1 of ") as caught:
            make()
        assert (caught.value.status, caught.value.code) == (500, "engine_error")
    [item] = json.loads(whole(b"[", text.base64_items(pooled(values[1:2])), b"]"))
    assert base64.b64decode(item) == values[1].tobytes()


def test_scores_are_numbers() -> None:
    values = np.array([[0.1], [-2.5e-10]], np.float32)
    assert text.number_texts(values) == [b"0.1", b"-2.5e-10"]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
@pytest.mark.parametrize("big_endian", [False, True])
def test_numbers_of_binary_replies(dtype: str, size: int, big_endian: bool) -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate((_any_floats(), np.array([np.nan, np.inf, -np.inf, 65519, 1e6], np.float32)))
    inputs = pooled(values[None])
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    body = text.octet_stream(inputs, "m", "r", dtype=dtype, big_endian=big_endian)
    data = b"".join(body.pieces)
    assert body.size == len(data) == size * len(values)
    item = whole(text.base64_items(inputs, dtype=dtype, big_endian=big_endian))
    assert base64.b64decode(json.loads(item)) == data
    found = np.frombuffer(data, f"u{size}")
    if big_endian:
        found = found.byteswap()
    as_torch = torch.from_numpy(found.view(f"i{size}").copy()).view(getattr(torch, dtype))
    assert torch.equal(as_torch.nan_to_num(7), expected.nan_to_num(7))


def _quantized(values: F32, kind: str) -> NDArray[np.generic]:
    """As sentence-transformers' quantize_embeddings computes it with ranges of ± 8 / sqrt(W)."""
    if kind == "ubinary":
        return np.packbits(values > 0).reshape(len(values), -1)
    if kind == "binary":
        return (np.packbits(values > 0).reshape(len(values), -1).astype(np.int16) - 128).astype(np.int8)
    edge = np.full(values.shape[1], 8 / values.shape[1] ** 0.5, np.float32)
    steps = (edge + edge) / 255
    scaled = (values + edge) / steps
    return (scaled - 128).astype(np.int8) if kind == "int8" else scaled.astype(np.uint8)


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
def test_integers_are_those_of_sentence_transformers(kind: str) -> None:
    values = random_values(50, 256)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    found = json.loads(whole(b"[", text.integer_items(pooled(values), kind), b"]"))
    np.testing.assert_array_equal(found, _quantized(values, kind))


def test_outliers_have_the_last_integers() -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, :2] = 0.8, -0.8
    signed = json.loads(whole(text.integer_items(pooled(values), "int8")))
    assert (signed[:2], max(signed), min(signed)) == ([127, -128], 127, -128)
    assert json.loads(whole(text.integer_items(pooled(values), "uint8")))[:2] == [255, 0]


def test_a_binary_reply_says_what_it_holds() -> None:
    values = random_values(3, 8)
    body = text.octet_stream(pooled(values), 'a "model"\n', "embd-1")
    assert body.kind == b"application/octet-stream"
    assert b"".join(body.pieces) == values.tobytes()
    [(name, value)] = body.headers
    metadata = json.loads(value)
    assert name == b"metadata"
    assert b"\n" not in value
    assert (metadata["id"], metadata["model"], metadata["shape"]) == ("embd-1", 'a "model"\n', [3, 8])
    assert metadata["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    item = metadata["data"][2]
    assert item == {
        "index": 2,
        "embed_dtype": "float32",
        "endianness": "little",
        "start": 64,
        "end": 96,
        "shape": [8],
    }


def test_a_binary_reply_lists_few_inputs() -> None:
    many = text.MAX_LISTED_INPUTS + 1
    [(_, value)] = text.octet_stream(pooled(random_values(many, 2)), "m", "r").headers
    metadata = json.loads(value)
    assert (metadata["data"], metadata["shape"]) == (None, [many, 2])
    [(_, value)] = text.octet_stream(pooled(random_values(6, 2), [4, 2]), "m", "r").headers
    places = [(each["start"], each["end"], each["shape"]) for each in json.loads(value)["data"]]
    assert places == [(0, 32, [4, 2]), (32, 48, [2, 2])]
    with pytest.raises(ApiError, match="not 65"):
        text.octet_stream(pooled(random_values(many, 2), [1] * many), "m", "r")


def test_a_safetensors_file_has_the_matrix() -> None:
    reader = pytest.importorskip("safetensors.numpy")
    values = random_values(6, 100_000)
    body = text.safetensors_body(pooled(values, [4, 2]), "m", "r")
    data = b"".join(body.pieces)
    assert (body.kind, body.size) == (b"application/vnd.safetensors", len(data))
    found = reader.load(data)
    np.testing.assert_array_equal(found["embeddings"], values)
    lengths: I32 = found["lengths"]
    assert lengths.tolist() == [4, 2]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(header["__metadata__"]["usage"]) == {"prompt_tokens": 6, "total_tokens": 6}
    assert set(reader.load(b"".join(text.safetensors_body(pooled(values), "m", "r").pieces))) == {
        "embeddings"
    }


def test_the_header_accept_asks() -> None:
    def asked(value: bytes) -> bytes:
        return text.asked_for([(b"accept", value)])

    assert text.asked_for(()) == asked(b"*/*") == asked(b"application/json") == b"application/json"
    assert asked(b"application/octet-stream") == b"application/octet-stream"
    assert asked(b"application/octet-stream;q=0.5, application/json") == b"application/json"
    assert asked(b"application/vnd.safetensors, */*;q=0.1") == b"application/vnd.safetensors"
