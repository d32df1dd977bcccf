"""The header of a safetensors file, which may be anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.errors import AdapterError
from penstock.adapters.safetensors_header import (
    ITEM_BYTES,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    TensorView,
    parse_header,
    parse_header_length,
)

FILE = "f"


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(header: Any, size: int = 24) -> dict[str, TensorView]:
    return parse_header(json.dumps(header).encode(), FILE, size)


def test_tensors_in_the_order_of_their_bytes_without_the_metadata() -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry("F16", [4], [24, 32]), "a": entry()}
    tensors = parse(header, 32)
    assert list(tensors.items()) == [
        ("a", TensorView("F32", (2, 3), 0, 24)),
        ("b", TensorView("F16", (4,), 24, 32)),
    ]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header: Expected `object`"),
        ({"a": 1}, "tensor a: Expected `object`"),
        ({"a": {}}, "tensor a: Object missing required field `dtype`"),
        ({"a": entry("I64")}, "tensor a: its dtype is 'I64'; it must be one of F32, F16, BF16"),
        ({"a": entry("F8_E4M3", (24,))}, "its dtype is 'F8_E4M3'"),
        ({"a": entry(shape=(2, 2))}, r"tensor a: 24 bytes are not those of the shape \[2, 2\] in F32"),
        ({"a": entry(shape=(-2, -3))}, ">= 0"),
        ({"a": entry(shape=(1 << 40, 1 << 40))}, "<="),
        ({"a": entry(shape=[1] * 9)}, "length <= 8"),
        ({"a": entry(offsets=(24, 0))}, "-24 bytes"),
        ({"a": entry(offsets=(-24, 0))}, ">= 0"),
        ({"a": entry(offsets=(0, 1 << 60))}, "<="),
        ({"a": entry(offsets=(0, 24, 48))}, "length 2"),
        ({"a": entry(offsets=(8, 32))}, "tensor a: it begins at byte 8, not at 0"),
        ({"a": entry(), "b": entry()}, "tensor b: it begins at byte 0, not at 24"),
        ({"a": entry(), "b": entry(offsets=(20, 44))}, "tensor b: it begins at byte 20, not at 24"),
        ({"a": entry(), "b": entry(offsets=(28, 52))}, "tensor b: it begins at byte 28, not at 24"),
        ({"a": entry(), "b": entry(offsets=(24, 48))}, "its tensors have 48 bytes, and the file has 24"),
        ({}, "its tensors have 0 bytes"),
        ({"a\n": entry()}, r"tensor 'a\\n': a name has at most 512 characters, all printable"),
        ({"a" * 513: entry()}, "a name has at most 512 characters"),
    ],
)
def test_what_is_wrong_is_named(header: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        parse(header)


def test_deep_and_broken_json() -> None:
    for text in (b"", b"{", b"\xff", b'{"a":' * 5000, b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"):
        with pytest.raises(AdapterError):
            parse_header(text, FILE, 0)


@pytest.mark.parametrize(
    ("start", "size", "message"),
    [
        (b"\x01", 1, "its header does not fit in its 1 bytes"),
        (b"\x01" + bytes(7), 8, "its header does not fit in its 8 bytes"),
        (b"\xff" * 8, 1 << 20, "its header does not fit"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), MAX_HEADER_BYTES * 2, "its header has 33554433 bytes"),
        (bytes(8), MAX_FILE_BYTES + 1, "the maximum is 17179869184"),
    ],
)
def test_the_header_s_length_is_bounded(start: bytes, size: int, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        parse_header_length(start, FILE, size)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
NUMBER = st.integers(-2, 20) | st.integers(1 << 33, 1 << 66)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEM_BYTES, "I8"]),
        "shape": st.lists(NUMBER, max_size=3),
        "data_offsets": st.lists(NUMBER, min_size=1, max_size=3),
    }
)


@given(header=st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=4), size=st.integers(0, 100))
def test_any_header_is_refused_or_covers_the_bytes(header: dict[str, Any], size: int) -> None:
    try:
        tensors = parse(header, size)
    except AdapterError:
        return
    assert sum(view.end - view.start for view in tensors.values()) == size
    assert all(0 <= view.start <= view.end <= size for view in tensors.values())


@given(header=st.binary(max_size=200), size=st.integers(0, 100))
def test_any_bytes_are_refused_or_cover_the_bytes(header: bytes, size: int) -> None:
    try:
        tensors = parse_header(header, FILE, size)
    except AdapterError:
        return
    assert sum(view.end - view.start for view in tensors.values()) == size
