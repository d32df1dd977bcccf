"""Prompts that an engine keeps, so that API servers send of the next ones only what follows.

A turn of a conversation repeats all turns before it. An API server knows what it has sent on a connection
and says of each long prompt with which tokens of an earlier one it begins
(:mod:`penstock.dispatch.sent_prompts`). To keep a prompt costs nothing while its stream runs, which has the
same bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from msgspec.structs import replace

from penstock.engine.base import RequestRejected
from penstock.wire.messages import PROMPT_GONE, Submit

PromptKey: TypeAlias = tuple[bytes, int]
"""Identity of the API server's connection, and its number for the prompt: no other can name it."""


class KeptPrompts:
    """The kept prompts of all connections, up to ``room`` bytes together; the least recently used ones are
    dropped first."""

    def __init__(self, room: int = 0) -> None:
        """``room``: 0 if none is kept."""
        self.room = room
        self.bytes = 0
        """Size of the kept prompts."""
        self.hits = self.misses = 0
        """Submits with a prefix that was there, and that was not."""
        self._prompts: OrderedDict[PromptKey, bytes] = OrderedDict()

    def restore(self, peer: bytes, submit: Submit) -> Submit:
        """The Submit with its whole prompt, which is kept if it says so. ``peer``: identity of the connection
        that it came from. Raises RequestRejected with the code PROMPT_GONE."""
        prefix, prompt = submit.prefix, submit.prompt
        if prefix is None and not submit.keep:
            return submit
        if prefix is not None:
            key = peer, prefix.number
            kept, size = self._prompts.get(key, b""), 4 * prefix.tokens
            if size > len(kept):
                self.misses += 1
                raise RequestRejected(
                    "the engine no longer keeps the prompt that this one begins with", PROMPT_GONE
                )
            self.hits += 1
            prompt = kept + prompt if size == len(kept) else b"".join((memoryview(kept)[:size], prompt))
            if prefix.replaced:
                self._drop(key)
            else:
                self._prompts.move_to_end(key)
        if submit.keep:
            self._keep((peer, submit.keep), prompt)
        return replace(submit, prompt=prompt, prefix=None, keep=0)

    def _keep(self, key: PromptKey, prompt: bytes) -> None:
        self._drop(key)
        self._prompts[key] = prompt
        self.bytes += len(prompt)
        while self.bytes > self.room:
            self._drop(next(iter(self._prompts)))

    def _drop(self, key: PromptKey) -> None:
        self.bytes -= len(self._prompts.pop(key, b""))

    def forget(self, peer: bytes) -> None:
        """Drop those of a connection that has ended."""
        for key in [key for key in self._prompts if key[0] == peer]:
            self._drop(key)
