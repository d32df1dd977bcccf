"""How many draft tokens are verified: from acceptance, and from what steps cost."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.speculation.draft_control import MAX_AUTO, RECOVERY, DraftControl

ONE = np.array([0])


def taught(
    fixed_s: float, token_s: float, streams: int, acceptance: float, drafts_s: float = 0.0
) -> DraftControl:
    """After 300 steps of ``streams`` streams, whose drafts are as long as they should be; each token is
    accepted with ``acceptance``. A step takes ``fixed_s``, ``token_s`` per token, and ``drafts_s`` if it has
    drafts."""
    random = np.random.default_rng(0)
    control = DraftControl(streams, None)
    slots = np.arange(streams)
    for _ in range(300):
        drafted = control.limits(slots)
        drafted = control.worthwhile(slots, drafted)
        control.on_scheduled(drafts=bool(drafted.any()))
        wrong = random.random((streams, MAX_AUTO + 1)) >= acceptance
        wrong[:, -1] = True
        accepted = np.minimum(wrong.argmax(axis=1), drafted).astype(np.int32)
        tokens = streams + int(drafted.sum())
        control.on_verified(slots, drafted, accepted)
        seconds = fixed_s + token_s * tokens + drafts_s * bool(drafted.any())
        control.observe(seconds, tokens, streams + int(accepted.sum()), drafts=bool(drafted.any()))
    return control


def test_a_number_of_tokens_is_always_the_limit() -> None:
    control = DraftControl(2, 5)
    control.on_verified(np.arange(2), np.full(2, 5, np.int32), np.zeros(2, np.int32))
    control.observe(1.0, 12, 2, drafts=True)
    assert control.limits(np.arange(2)).tolist() == [5, 5]


def test_drafts_that_cost_little_and_are_accepted_are_long() -> None:
    assert taught(0.01, 0.0001, 1, 0.98).limits(ONE)[0] >= MAX_AUTO - 2


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_there_are_none_where_tokens_are_all_that_costs(acceptance: float) -> None:
    control = taught(0.0001, 0.001, 64, acceptance)
    limits = control.limits(np.arange(64))
    assert not control.worthwhile(np.arange(64), limits).any()


def test_fewer_streams_get_longer_drafts() -> None:
    limits = [taught(0.01, 0.0005, streams, 0.8).limits(ONE)[0] for streams in (1, 8, 64)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1]


def test_a_stream_whose_drafts_fail_has_none_and_tries_again() -> None:
    control = taught(0.01, 0.001, 1, 0.0)
    misses = 0
    while control.limits(ONE)[0] == 0:
        misses += 1
        assert misses < 4 / RECOVERY, "it never tries again"
    assert misses > 0
    control.begin(0)
    assert control.limits(ONE)[0] > 0


def test_one_slow_step_changes_little() -> None:
    control = taught(0.01, 0.0005, 8, 0.8)
    before = control.limits(np.arange(8))
    control.observe(5.0, 40, 20, drafts=True)
    assert np.abs(control.limits(np.arange(8)) - before).max() <= 2


def test_drafts_that_are_too_few_for_a_step_with_drafts_are_left_out() -> None:
    control, slots = DraftControl(8, None), np.arange(8)
    for step in range(300):
        drafted = np.full(8, step % 3 == 1, np.int32)
        drafted[0] = step % 3 > 0
        control.on_verified(slots, drafted, drafted)
        tokens, some = 8 + int(drafted.sum()), bool(drafted.any())
        control.observe(0.01 + 0.00001 * tokens + 0.004 * some, tokens, tokens, drafts=some)
    assert not control.worthwhile(slots, np.array([1, 0, 0, 0, 0, 0, 0, 0], np.int32)).any()
    assert control.worthwhile(slots, np.ones(8, np.int32)).all()


def test_a_new_stream_expects_what_the_streams_before_it_had() -> None:
    for acceptance, expected in ((0.0, (0, 1)), (0.98, (4, MAX_AUTO))):
        control = taught(0.01, 0.0005, 8, acceptance)
        control.begin(0)
        assert expected[0] <= control.limits(ONE)[0] <= expected[1]
        new = np.empty(0, np.int32)
        control.on_verified(np.array([], np.intp), new, new)
        assert np.isfinite(control.limits(ONE)).all()
    control = taught(0.01, 0.0005, 8, 0.0)
    for _ in range(int(6 / RECOVERY)):
        control.limits(ONE)
    control.begin(0)
    assert control.limits(ONE)[0] >= 1


def test_steps_of_no_time_do_no_harm() -> None:
    control = DraftControl(1, None)
    for seconds in (0.0, 0.0, 0.01):
        control.observe(seconds, 1, 1, drafts=False)
    assert control._costs._seconds > 0
    assert np.isfinite(control._costs.of_drafts(1, 4)).all()
