"""HPACK against the library's encoder and decoder, and its limits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import hpack
import pytest

from penstock.http.http2.faults import ConnectionFault, ErrorCode
from penstock.http.http2.header_blocks import (
    MALFORMED,
    HeaderDecoder,
    HeaderListTooLarge,
    encode_fields,
    encode_status,
)

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"127.0.0.1:8000"),
    (b":path", b"/v1/completions"),
    (b"content-type", b"application/json"),
    (b"authorization", b"Bearer sk-abc"),
    (b"content-length", b"120"),
]


def decode(block: bytes, decoder: HeaderDecoder | None = None) -> Sequence[tuple[bytes, bytes]]:
    return (decoder or HeaderDecoder()).decode(block, 65536, 128)


@pytest.mark.parametrize("huffman", [True, False])
def test_blocks_of_a_foreign_encoder_decode_with_its_table(huffman: bool) -> None:
    encoder, decoder, choose = hpack.Encoder(), HeaderDecoder(), random.Random(5)
    for number in range(300):
        if number % 50 == 49:
            encoder.header_table_size = choose.choice([0, 100, 4096])
        fields = [
            *REQUEST[:6],
            (b"content-length", b"%d" % choose.randrange(200)),
            (b"x-%d" % choose.randrange(60), bytes(choose.choices(range(33, 127), k=choose.randrange(300)))),
        ]
        assert decode(encoder.encode(fields, huffman=huffman), decoder) == fields


def test_what_is_encoded_is_read_by_a_foreign_decoder_and_enters_no_table() -> None:
    fields = [
        *REQUEST,
        (b"x-long", b"v" * 1000),
        (b"n" * 200, b""),
        (b"etag", b"e" * 127),
        (b"www-authenticate", b"Bearer"),
    ]
    decoder = hpack.Decoder()
    assert decoder.decode(encode_fields(fields), raw=True) == fields
    assert not decoder.header_table.dynamic_entries
    assert decode(encode_fields(fields)) == fields
    secret = decoder.decode(encode_fields([(b"authorization", b"s")]), raw=True)
    assert isinstance(secret, list)
    assert not secret[0].indexable


def test_a_status_is_one_byte_where_the_static_table_has_it() -> None:
    assert encode_status(200) == b"\x88"
    assert decode(encode_status(429)) == [(b":status", b"429")]


@pytest.mark.parametrize(
    "field",
    [
        (b"Upper", b"x"),
        (b"", b"x"),
        (b":", b"x"),
        (b"a b", b"x"),
        (b"a:b", b"x"),
        (b"caf\xe9", b"x"),
        (b"a", b"x\r\nb: y"),
        (b"a", b"\0"),
        (b"a", b" x"),
        (b"a", b"x\t"),
        (b"a", b"x\x7f"),
    ],
)
def test_malformed_fields_are_marked_also_as_entries_of_the_table(field: tuple[bytes, bytes]) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    for _ in range(2):  # the second time it is an index
        [(name, reason), good] = decode(encoder.encode([field, (b"a", b"caf\xe9 \t!")]), decoder)
        assert name == MALFORMED, reason
        assert good == (b"a", b"caf\xe9 \t!")


def test_a_list_that_is_too_large_leaves_the_table_right() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    large = [(b"x-%d" % number, b"v" * 100) for number in range(20)]
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(encoder.encode(large), 1000, 128)
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(encoder.encode(large), 65536, 19)
    assert decoder.decode(encoder.encode(large), 65536, 20) == large


def test_a_small_block_of_a_huge_list_is_not_expanded() -> None:
    """An HPACK bomb: one entry of 4 KiB, named by each byte of the block."""
    decoder = HeaderDecoder()
    bomb = hpack.Encoder().encode([(b"x", b"v" * 4000)], huffman=False)
    with pytest.raises(HeaderListTooLarge):
        decode(bomb + b"\xbe" * 900, decoder)
    with pytest.raises(ConnectionFault) as caught:
        decode(bomb + b"\xbe" * 16_000, decoder)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"\x80", "index 0"),
        (b"\xbe", "no entry"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff", "more than four bytes"),
        (b"\xff", "truncated"),
        (b"\x40", "truncated"),
        (b"\x00\x05ab", "longer than its block"),
        (b"\x7f\x00\x01x", "no entry"),
        (b"\x3f\xe2\x1f", "a table of 4097 bytes"),
        (b"\x82\x20", "behind a field"),
        (b"\x0f\x00\x82\xff\xff", "Huffman"),
        (b"\x00\x01a\x81\xfe", "Huffman"),
        (b"\x00\x01a\x82\x07\xff", "Huffman"),
    ],
)
def test_what_is_not_hpack_ends_the_connection(block: bytes, reason: str) -> None:
    with pytest.raises(ConnectionFault, match=reason) as caught:
        decode(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


def test_any_bytes_decode_or_are_refused() -> None:
    choose = random.Random(6)
    decoder = HeaderDecoder()
    for _ in range(3000):
        try:
            decode(choose.randbytes(choose.randrange(40)), decoder)
        except ConnectionFault:
            decoder = HeaderDecoder()
