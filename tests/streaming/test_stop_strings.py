"""Stop strings against a search in the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.streaming.stop_strings import StopMatcher
from tests.stop_reference import until_stop

letters = st.text("ab", min_size=1, max_size=4)


@given(
    st.lists(letters, min_size=1, max_size=3, unique=True), st.lists(st.text("ab", max_size=3)), st.booleans()
)
@example(["abab"], ["aba", "bab"], False)
@example(["ab", "b"], ["a", "b"], True)
def test_pieces_give_what_the_whole_text_gives(stops: list[str], pieces: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    text, found = "", None
    for piece in pieces:
        certain, found = matcher.push(piece)
        text += certain
        if found is not None:
            break
    else:
        text += matcher.finish()
    expected, stop = until_stop("".join(pieces), stops, include)
    assert (text, found) == (expected, stop)


@given(st.lists(letters, min_size=1, max_size=3), st.lists(st.text("abc", max_size=3)))
def test_nothing_is_held_that_cannot_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    given_out = ""
    for number, piece in enumerate(pieces):
        certain, found = matcher.push(piece)
        if found is not None:
            return
        given_out += certain
        so_far = "".join(pieces[: number + 1])
        held = so_far[len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    matcher = StopMatcher(["</s>"], include=False)
    assert matcher.push("text <") == ("text ", None)
    assert matcher.push("/s") == ("", None)
    assert matcher.push("> more") == ("", "</s>")
