from __future__ import annotations

import pytest
from tokenizers import Regex, decoders

from penstock.streaming.decoder_plan import Mode, read_plan, strip_start

FUSE, BYTE_FALLBACK, BYTE_LEVEL = decoders.Fuse(), decoders.ByteFallback(), decoders.ByteLevel()
MARKS = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    ("chain", "mode"),
    [
        ([BYTE_LEVEL], Mode.BYTES),
        ([decoders.Sequence([BYTE_LEVEL]), FUSE], Mode.BYTES),
        ([MARKS, BYTE_LEVEL, decoders.Strip(" ", 1, 0)], Mode.BYTES),
        ([MARKS, BYTE_FALLBACK, FUSE, decoders.Strip(" ", 1, 0)], Mode.TEXT),
        ([MARKS, BYTE_FALLBACK, FUSE], Mode.TEXT),
        ([BYTE_FALLBACK, FUSE, MARKS], Mode.TEXT),
        ([decoders.Replace(Regex("a+"), "b"), FUSE], Mode.TEXT),
        ([decoders.Metaspace()], Mode.TEXT),
        ([decoders.WordPiece()], Mode.TEXT),
        ([], Mode.TEXT),
        ([decoders.CTC()], Mode.PAIR),
        ([decoders.BPEDecoder()], Mode.PAIR),
        ([decoders.CTC(), decoders.Metaspace()], Mode.WHOLE),
        ([decoders.BPEDecoder(suffix="")], Mode.WHOLE),
        ([decoders.BPEDecoder(suffix="oo")], Mode.WHOLE),
        ([decoders.Metaspace(), BYTE_LEVEL], Mode.BYTES),
        ([BYTE_FALLBACK, BYTE_LEVEL], Mode.WHOLE),
        ([BYTE_FALLBACK, BYTE_FALLBACK], Mode.WHOLE),
        ([FUSE, BYTE_FALLBACK], Mode.WHOLE),
        ([FUSE, decoders.Replace("▁▁", " ")], Mode.WHOLE),
        ([FUSE, decoders.Strip(" ", 1, 0), MARKS], Mode.WHOLE),
        ([FUSE, decoders.Strip(" ", 1, 0), decoders.Strip("a", 1, 0)], Mode.WHOLE),
        ([FUSE, decoders.Strip(" ", 0, 1)], Mode.WHOLE),
        ([decoders.Strip(" ", 1, 1)], Mode.WHOLE),
        ([BYTE_LEVEL, MARKS], Mode.WHOLE),
        ([decoders.Replace("", "-")], Mode.WHOLE),
    ],
    ids=str,
)
def test_the_mode_of_a_chain(chain: list[decoders.Decoder], mode: Mode) -> None:
    assert read_plan(decoders.Sequence(chain), ["a", "fooo", "b</w>", None]).mode is mode
    if len(chain) == 1:
        assert read_plan(chain[0], ["a", "fooo", "b</w>", None]).mode is mode


@pytest.mark.parametrize(("most", "rest"), [(0, "aaba"), (1, "aba"), (2, "ba"), (5, "ba")])
def test_strip_start_drops_at_most_so_many(most: int, rest: str) -> None:
    assert strip_start("aaba", "a", most) == rest


def test_strip_start_may_leave_nothing() -> None:
    assert strip_start("aa", "a", 2) == ""
    assert strip_start("", "a", 2) == ""
