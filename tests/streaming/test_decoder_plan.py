from __future__ import annotations

import pytest
from tokenizers import Regex, decoders

from penstock.streaming.decoder_plan import DecoderMode, read_decoder_plan, strip_start

FUSE, BYTE_FALLBACK, BYTE_LEVEL = decoders.Fuse(), decoders.ByteFallback(), decoders.ByteLevel()
MARKS = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    ("chain", "mode"),
    [
        ([BYTE_LEVEL], DecoderMode.BYTES),
        ([decoders.Sequence([BYTE_LEVEL]), FUSE], DecoderMode.BYTES),
        ([MARKS, BYTE_LEVEL, decoders.Strip(" ", 1, 0)], DecoderMode.BYTES),
        ([MARKS, BYTE_FALLBACK, FUSE, decoders.Strip(" ", 1, 0)], DecoderMode.TEXT),
        ([MARKS, BYTE_FALLBACK, FUSE], DecoderMode.TEXT),
        ([BYTE_FALLBACK, FUSE, MARKS], DecoderMode.TEXT),
        ([decoders.Replace(Regex("a+"), "b"), FUSE], DecoderMode.TEXT),
        ([decoders.Metaspace()], DecoderMode.TEXT),
        ([decoders.WordPiece()], DecoderMode.TEXT),
        ([], DecoderMode.TEXT),
        ([decoders.CTC()], DecoderMode.PAIR),
        ([decoders.BPEDecoder()], DecoderMode.PAIR),
        ([decoders.CTC(), decoders.Metaspace()], DecoderMode.WHOLE),
        ([decoders.BPEDecoder(suffix="")], DecoderMode.WHOLE),
        ([decoders.BPEDecoder(suffix="oo")], DecoderMode.WHOLE),
        ([decoders.Metaspace(), BYTE_LEVEL], DecoderMode.BYTES),
        ([BYTE_FALLBACK, BYTE_LEVEL], DecoderMode.WHOLE),
        ([BYTE_FALLBACK, BYTE_FALLBACK], DecoderMode.WHOLE),
        ([FUSE, BYTE_FALLBACK], DecoderMode.WHOLE),
        ([FUSE, decoders.Replace("▁▁", " ")], DecoderMode.WHOLE),
        ([FUSE, decoders.Strip(" ", 1, 0), MARKS], DecoderMode.WHOLE),
        ([FUSE, decoders.Strip(" ", 1, 0), decoders.Strip("a", 1, 0)], DecoderMode.WHOLE),
        ([FUSE, decoders.Strip(" ", 0, 1)], DecoderMode.WHOLE),
        ([decoders.Strip(" ", 1, 1)], DecoderMode.WHOLE),
        ([BYTE_LEVEL, MARKS], DecoderMode.WHOLE),
        ([decoders.Replace("", "-")], DecoderMode.WHOLE),
    ],
    ids=str,
)
def test_the_mode_of_a_chain(chain: list[decoders.Decoder], mode: DecoderMode) -> None:
    assert read_decoder_plan(decoders.Sequence(chain), ["a", "fooo", "b</w>", None]).mode is mode
    if len(chain) == 1:
        assert read_decoder_plan(chain[0], ["a", "fooo", "b</w>", None]).mode is mode


@pytest.mark.parametrize(("most", "rest"), [(0, "aaba"), (1, "aba"), (2, "ba"), (5, "ba")])
def test_strip_start_drops_at_most_so_many(most: int, rest: str) -> None:
    assert strip_start("aaba", "a", most) == rest


def test_strip_start_may_leave_nothing() -> None:
    assert strip_start("aa", "a", 2) == ""
    assert strip_start("", "a", 2) == ""
