"""The state tables of streams and replies are whole, and every state leads to an end."""

from __future__ import annotations

import pytest

from penstock.streaming.request_states import (
    REPLY_TRANSITIONS,
    STREAM_TRANSITIONS,
    IllegalTransitionError,
    ReplyEvent,
    ReplyState,
    StreamEvent,
    StreamState,
    next_reply_state,
    next_stream_state,
)


def test_every_state_has_a_row() -> None:
    assert set(STREAM_TRANSITIONS) == set(StreamState)
    assert set(REPLY_TRANSITIONS) == set(ReplyState)


@pytest.mark.parametrize("state", [state for state in StreamState if state is not StreamState.NEW])
def test_a_stream_that_was_opened_can_always_end(state: StreamState) -> None:
    assert next_stream_state(state, StreamEvent.END) is StreamState.ENDED


@pytest.mark.parametrize("state", list(ReplyState)[:4])
def test_a_reply_ends_from_every_live_state(state: ReplyState) -> None:
    sent = state in (ReplyState.STREAMING, ReplyState.PAUSED)
    assert next_reply_state(state, ReplyEvent.END) is (ReplyState.ENDED if sent else ReplyState.UNSENT)


def test_nothing_leaves_the_end() -> None:
    assert set(STREAM_TRANSITIONS[StreamState.ENDED].values()) == {StreamState.ENDED}
    assert set(REPLY_TRANSITIONS[ReplyState.ENDED].values()) == {ReplyState.ENDED}
    assert set(REPLY_TRANSITIONS[ReplyState.UNSENT].values()) == {ReplyState.UNSENT, ReplyState.ENDED}


@pytest.mark.parametrize("event", [StreamEvent.ASSIGN, StreamEvent.LOSE_ENGINE, StreamEvent.OPEN])
def test_no_engine_gets_a_stream_that_ended_or_was_dropped(event: StreamEvent) -> None:
    for state in (StreamState.ENDED, StreamState.DROPPED):
        with pytest.raises(IllegalTransitionError, match=f"{state.name} got {event.name}"):
            next_stream_state(state, event)


def test_a_reply_ends_once() -> None:
    for state in (ReplyState.ENDED, ReplyState.UNSENT):
        with pytest.raises(IllegalTransitionError, match=f"{state.name} got END"):
            next_reply_state(state, ReplyEvent.END)


def test_a_client_that_pauses_before_the_first_event() -> None:
    state = next_reply_state(ReplyState.WAITING, ReplyEvent.PAUSE)
    assert next_reply_state(state, ReplyEvent.RESUME) is ReplyState.WAITING
    assert next_reply_state(state, ReplyEvent.SEND) is ReplyState.PAUSED
