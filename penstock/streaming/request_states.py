"""The life of a request: two state tables that the methods of streams and replies follow.

A request has one reply, which its client reads, and one stream per choice, which an engine runs.

A stream (:class:`penstock.streaming.output_processor.OutputProcessor` makes its transitions)::

    NEW ──open──► RUNNING ──lose_engine──► INTERRUPTED ──assign──► RUNNING (resumed on another engine)
                    │   └─────drop──────► DROPPED          │
                    │                        │             │
                    └─────────end────────► ENDED ◄───end───┘

A dropped stream keeps its handle until its engine confirms the end, so that late rows cannot reach another
stream; one that is dropped before it is open has ended. A stream that an engine refuses for lack of room is
assigned to the next engine and stays RUNNING.

A reply (:class:`penstock.generation.replies.reply.RequestReply` and its two kinds)::

    WAITING ──send──► STREAMING ──end──► ENDED
       ▲ │              ▲ │
 resume│ │pause   resume│ │pause
       │ ▼              │ ▼
    BLOCKED ──send──► PAUSED ──end──► ENDED          WAITING, BLOCKED ──end──► UNSENT ──send──► ENDED

A paused client does not read: rows are held, and become one event when it resumes. UNSENT replies have ended
before their first byte: an HTTP error or a whole body can still follow.
"""

from __future__ import annotations

import enum


class IllegalTransitionError(RuntimeError):
    """An event that cannot happen in a state: a fault of the code that reports it."""


class StreamState(enum.IntEnum):
    NEW = 0
    RUNNING = 1
    """Submitted to an engine, which runs it or has it in its queue."""
    INTERRUPTED = 2
    """The stream's engine is lost; it waits for another one."""
    DROPPED = 3
    """The request no longer wants the stream; the engine has not confirmed the end."""
    ENDED = 4
    """The stream's handle is free."""


class StreamEvent(enum.IntEnum):
    OPEN = 0
    ASSIGN = 1
    LOSE_ENGINE = 2
    DROP = 3
    END = 4


class ReplyState(enum.IntEnum):
    WAITING = 0
    """Nothing is sent yet."""
    STREAMING = 1
    """Events are being sent."""
    BLOCKED = 2
    """Nothing is sent yet, and the client does not read: it has not read an earlier reply."""
    PAUSED = 3
    """Events were sent, and the client does not read."""
    UNSENT = 4
    """Ended, and nothing was sent."""
    ENDED = 5


class ReplyEvent(enum.IntEnum):
    SEND = 0
    PAUSE = 1
    RESUME = 2
    END = 3


STREAM_TRANSITIONS: dict[StreamState, dict[StreamEvent, StreamState]] = {
    StreamState.NEW: {StreamEvent.OPEN: StreamState.RUNNING, StreamEvent.DROP: StreamState.ENDED},
    StreamState.RUNNING: {
        StreamEvent.ASSIGN: StreamState.RUNNING,
        StreamEvent.LOSE_ENGINE: StreamState.INTERRUPTED,
        StreamEvent.DROP: StreamState.DROPPED,
        StreamEvent.END: StreamState.ENDED,
    },
    StreamState.INTERRUPTED: {
        StreamEvent.ASSIGN: StreamState.RUNNING,
        StreamEvent.DROP: StreamState.DROPPED,
        StreamEvent.END: StreamState.ENDED,
    },
    StreamState.DROPPED: {StreamEvent.DROP: StreamState.DROPPED, StreamEvent.END: StreamState.ENDED},
    # A request may drop a stream whose engine has just ended it.
    StreamState.ENDED: {StreamEvent.DROP: StreamState.ENDED, StreamEvent.END: StreamState.ENDED},
}

REPLY_TRANSITIONS: dict[ReplyState, dict[ReplyEvent, ReplyState]] = {
    ReplyState.WAITING: {
        ReplyEvent.SEND: ReplyState.STREAMING,
        ReplyEvent.PAUSE: ReplyState.BLOCKED,
        ReplyEvent.END: ReplyState.UNSENT,
    },
    ReplyState.STREAMING: {
        ReplyEvent.SEND: ReplyState.STREAMING,
        ReplyEvent.PAUSE: ReplyState.PAUSED,
        ReplyEvent.END: ReplyState.ENDED,
    },
    ReplyState.BLOCKED: {
        ReplyEvent.SEND: ReplyState.PAUSED,
        ReplyEvent.RESUME: ReplyState.WAITING,
        ReplyEvent.END: ReplyState.UNSENT,
    },
    ReplyState.PAUSED: {
        ReplyEvent.SEND: ReplyState.PAUSED,
        ReplyEvent.RESUME: ReplyState.STREAMING,
        ReplyEvent.END: ReplyState.ENDED,
    },
    # The outcome is recorded before the last events are written, and writing them may fill the connection's
    # buffer.
    ReplyState.UNSENT: {
        ReplyEvent.SEND: ReplyState.ENDED,
        ReplyEvent.PAUSE: ReplyState.UNSENT,
        ReplyEvent.RESUME: ReplyState.UNSENT,
    },
    ReplyState.ENDED: {
        ReplyEvent.SEND: ReplyState.ENDED,
        ReplyEvent.PAUSE: ReplyState.ENDED,
        ReplyEvent.RESUME: ReplyState.ENDED,
    },
}


def next_stream_state(state: StreamState, event: StreamEvent) -> StreamState:
    """Raises IllegalTransitionError."""
    try:
        return STREAM_TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(f"a stream that is {state.name} got {event.name}") from None


def next_reply_state(state: ReplyState, event: ReplyEvent) -> ReplyState:
    """Raises IllegalTransitionError."""
    try:
        return REPLY_TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(f"a reply that is {state.name} got {event.name}") from None
