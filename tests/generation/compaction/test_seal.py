"""Sealed texts: what opens them, and what does not."""

from __future__ import annotations

import pytest

from penstock.generation.compaction.seal import MAX_SEALED, Seals

KEY = bytes(range(32))
TEXT = "Goal: naïve 👍🏽 “x”\n" * 50


@pytest.mark.parametrize("text", ["", "a", TEXT, "\0" * 100])
def test_another_process_with_the_key_opens_it(text: str) -> None:
    sealed = Seals(KEY).seal(text, "tenant")
    assert Seals(KEY).open(sealed, "tenant") == text
    assert sealed.isascii()
    assert '"' not in sealed
    assert "\\" not in sealed


def test_nothing_else_opens_it() -> None:
    sealed = Seals(KEY).seal(TEXT, "tenant")
    assert Seals(KEY[::-1]).open(sealed, "tenant") is None
    assert Seals(KEY).open(sealed, "other") is None
    assert Seals(KEY).open(sealed, "") is None


def test_no_change_of_it_opens() -> None:
    seals = Seals(KEY)
    sealed = seals.seal("short", "")
    for place in range(len(sealed)):
        for character in "Aa0=":
            changed = sealed[:place] + character + sealed[place + 1 :]
            assert seals.open(changed, "") in ((None,) if changed != sealed else ("short",)), place
        assert seals.open(sealed[:place], "") is None
    assert seals.open(sealed + "AAAA", "") is None


def test_two_seals_of_one_text_differ_and_hide_it() -> None:
    seals = Seals(KEY)
    assert seals.seal(TEXT, "") != seals.seal(TEXT, "")
    assert len({seals.seal("A" * 300, "")[20:] for _ in range(20)}) == 20


@pytest.mark.parametrize("text", ["", "penstock-seal1.", "penstock-seal1.é", "gAAAAA", "penstock-seal1.AAAA"])
def test_other_texts_do_not_open(text: str) -> None:
    assert Seals(KEY).open(text, "") is None


def test_a_huge_text_is_not_read() -> None:
    assert Seals(KEY).open("penstock-seal1." + "A" * MAX_SEALED, "") is None
