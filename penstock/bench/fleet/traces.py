"""Synthetic traces of conversations: what arrives at a fleet, whatever chooses the servers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

BLOCK_TOKENS = 64
"""Tokens of a block: prompts are lists of blocks, equal where their text is equal up to there."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request of a conversation."""

    blocks: tuple[int, ...]
    """The prompt's complete blocks."""
    tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    blocks_after: tuple[int, ...]
    """The blocks of prompt and reply, with which the next turn begins."""
    think_s: float
    """Seconds between the end of the reply and the next turn."""


@dataclass(frozen=True, slots=True)
class TraceConversation:
    """Turns that follow each other."""

    id: int
    starts_at_s: float
    turns: list[TraceTurn]


@dataclass(slots=True)
class _Blocks:
    """Makes blocks: new text, or text that several conversations begin with."""

    _next: count[int] = field(default_factory=count)

    def new(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._next) for _ in range(tokens // BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Shape:
    """How the conversations of a trace look."""

    prefixes: tuple[int, ...]
    """Tokens of each beginning that conversations share, such as an agent's instructions and tools."""
    first_tokens: tuple[int, int]
    """Least and most tokens that the first turn adds to it."""
    turns: tuple[int, int]
    added_tokens: tuple[int, int]
    """Least and most tokens that each further turn adds."""
    output_tokens: tuple[int, int]
    think_s: tuple[float, float]
    per_server_s: float
    """Conversations that begin per second and server."""


TRACES = {
    "chat": Shape(
        prefixes=(256, 256, 512, 1024),
        first_tokens=(50, 1500),
        turns=(1, 6),
        added_tokens=(20, 300),
        output_tokens=(50, 500),
        think_s=(2.0, 20.0),
        per_server_s=1.0,
    ),
    "agents": Shape(
        prefixes=(12_000, 9_000, 18_000, 6_000),
        first_tokens=(200, 4000),
        turns=(8, 40),
        added_tokens=(100, 3000),
        output_tokens=(40, 400),
        think_s=(0.5, 8.0),
        per_server_s=0.14,
    ),
    "documents": Shape(
        prefixes=tuple([6000] * 40),
        first_tokens=(30, 200),
        turns=(1, 3),
        added_tokens=(30, 200),
        output_tokens=(50, 300),
        think_s=(2.0, 20.0),
        per_server_s=1.2,
    ),
}
"""Chats; coding agents, whose histories grow with every tool call; questions about one of 40 documents."""


def make_trace(
    shape: Shape, servers: int, duration_s: float, load: float, seed: int
) -> list[TraceConversation]:
    """Conversations that begin within ``duration_s``, in order of time; ``load`` multiplies their rate."""
    rng, blocks = random.Random(seed), _Blocks()
    prefixes = [blocks.new(tokens) for tokens in shape.prefixes]
    rate = shape.per_server_s * servers * load
    conversations: list[TraceConversation] = []
    at = rng.expovariate(rate)
    while at < duration_s:
        conversations.append(_conversation(len(conversations), at, shape, prefixes, blocks, rng))
        at += rng.expovariate(rate)
    return conversations


def _conversation(
    id: int, at: float, shape: Shape, prefixes: list[tuple[int, ...]], blocks: _Blocks, rng: random.Random
) -> TraceConversation:
    history = rng.choice(prefixes)
    turns, added = [], rng.randint(*shape.first_tokens)
    for _ in range(rng.randint(*shape.turns)):
        prompt = history + blocks.new(added)
        output = rng.randint(*shape.output_tokens)
        history = prompt + blocks.new(output)
        turns.append(
            TraceTurn(
                blocks=prompt,
                tokens=len(prompt) * BLOCK_TOKENS + added % BLOCK_TOKENS,
                output_tokens=output,
                blocks_after=history,
                think_s=rng.uniform(*shape.think_s),
            )
        )
        added = rng.randint(*shape.added_tokens)
    return TraceConversation(id, at, turns)
