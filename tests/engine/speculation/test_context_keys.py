"""Keys of contexts against a polynomial that is computed plainly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculation.context_keys import ContextKeys, KeySpace, OneRowKeys

SIZES = (2, 3, 6)
SPACE = KeySpace(SIZES, 64, seed=5)
MODULUS = 1 << 64


def key(context: list[int], size: int, scope: int) -> int:
    base = int(SPACE.powers[1])
    value = sum((token + 1) * pow(base, i - len(context), MODULUS) for i, token in enumerate(context))
    return value * int(SPACE.factors(scope)[SIZES.index(size)]) % MODULUS


def window_keys(windows: list[list[int]], scopes: list[int], room: int = 8) -> ContextKeys:
    factors = np.stack([SPACE.factors(scope) for scope in scopes], axis=1)
    return ContextKeys(SPACE, np.array(windows, np.int32).T, factors, room)


@given(
    st.lists(st.integers(-1, 300_000), min_size=6, max_size=20),
    st.lists(st.integers(0, (1 << 31) - 1), max_size=4),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_keys_are_of_the_last_tokens_alone(window: list[int], appended: list[int], scope: int) -> None:
    keys = window_keys([window, window[::-1]], [scope, 1])
    one = OneRowKeys(SPACE, window, SPACE.factors(scope).tolist())
    for tokens in [window, *(window + appended[: n + 1] for n in range(len(appended)))]:
        if tokens is not window:
            keys.append(np.array([tokens[-1], 3], np.uint64))
            one.append(tokens[-1])
        expected = [key(tokens[-size:], size, scope) for size in SIZES]
        assert keys.at_end()[:, 0].tolist() == expected
        assert one.at(len(tokens)) == expected
    along = window_keys([window, window[::-1]], [scope, 1]).along(6)
    for position, end in enumerate(range(6, len(window) + 1)):
        assert along[:, position, 0].tolist() == [key(window[end - s : end], s, scope) for s in SIZES]
        back = window[::-1]
        assert along[:, position, 1].tolist() == [key(back[end - s : end], s, 1) for s in SIZES]


def test_no_two_contexts_have_a_key() -> None:
    """Not those of zeros, of which one is longer than the other, nor those of two scopes or sizes."""
    windows = [[0] * 6, [-1] * 4 + [0, 0], [-1] * 3 + [0] * 3, [0, 1] * 3, [1, 0] * 3]
    keys = [window_keys(windows, [scope] * len(windows)).at_end() for scope in (0, 1, -1, 1 << 62)]
    distinct = {int(value) for columns in keys for value in columns.ravel()}
    # The windows of zeros have a context of 2 in common, two of them one of 3; the last two none.
    assert len(distinct) == 4 * (3 + 4 + 5)


def test_secrets_differ() -> None:
    assert KeySpace(SIZES, 4).factors(0).tolist() != KeySpace(SIZES, 4).factors(0).tolist()
