"""Keeps engines in lock-step, without I/O: waves of steps that all ranks run together.

A model whose experts are spread over the ranks computes a layer only when every rank computes it, so a
rank that has nothing to do must run dummy steps while another one works. A *wave* is a stretch of steps
that all ranks run. Between waves the ranks sleep.

- A sleeping rank that gets work starts the wave and says StartWave to its peers, who join at once.
- After every ``interval`` steps each rank tells its peers whether it has work (Vote) and waits for
  theirs. All ranks see the same votes, hence come to the same verdict: go on if anyone has work, sleep
  otherwise.

Agreements are numbered from 0 for as long as the group lives, and every rank has made the same number of
steps before each of them; a wave is known by the number of its first agreement. So no message needs a
wave's own count, a late StartWave is told from a timely one, and work that comes between a vote and its
verdict is not lost: it starts the next wave. A peer can be one agreement ahead, never two, because it
needs this rank's vote for the next one.

A rank that is to end says LeaveGroup, has no work from then on, and stays until the others have said so as
well and the wave is over: whoever begins a wave finds all ranks there.

Messages (:mod:`penstock.wire.waves`) of one rank to another arrive in order or the connection breaks; with
it breaks the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.wire.waves import LeaveGroup, StartWave, Vote, WaveMessage


class WaveProtocolError(RuntimeError):
    """A peer said what it cannot say in this state: the group is broken."""


@dataclass(slots=True)
class WaveProtocol:
    """One rank of ``size``. Each method returns the messages to send to every peer, in order.

    The engine loop calls :meth:`before_step` when its rank may have to do something, steps when
    :attr:`may_step` says so (a dummy step when it has no work of its own), and :meth:`on_step` after it.
    """

    rank: int
    size: int
    interval: int
    """Steps from one agreement to the next; the same on every rank."""
    sync_round: int = 0
    """Number of the next agreement: all ranks have made ``agreement * interval`` steps before it began."""
    running: bool = False
    """Whether a wave is on."""
    steps: int = 0
    """Steps since the last agreement, 0 to ``interval``."""
    waves: int = 0
    """Waves begun."""
    _woken: bool = False
    """A peer has begun the wave after this one, whose end is not known here yet."""
    _votes: list[dict[int, bool]] = field(default_factory=lambda: [{}, {}])
    """Votes by rank, for ``sync_round`` and for the one after it."""
    _left: set[int] = field(default_factory=set)
    """Ranks that have said LeaveGroup."""

    @property
    def may_step(self) -> bool:
        return self.running and self.steps < self.interval

    @property
    def may_exit(self) -> bool:
        """Whether no rank needs this one any longer."""
        return len(self._left) == self.size and not self.running

    def before_step(self, has_work: bool) -> Sequence[WaveMessage]:
        """Begin a wave when this rank sleeps and has work."""
        if self.running or not has_work:
            return ()
        self._begin()
        return (StartWave(self.sync_round),)

    def on_step(self, has_work: bool) -> Sequence[WaveMessage]:
        """A step was made, a dummy one or not; ``has_work``: whether there is more to do here."""
        assert self.may_step, "a step that the other ranks do not make"
        self.steps += 1
        if self.steps < self.interval:
            return ()
        vote = Vote(self.sync_round, has_work)
        self._votes[0][self.rank] = has_work
        self._tally_votes()
        return (vote,)

    def leave(self) -> Sequence[WaveMessage]:
        """This rank has no work from here on."""
        self._left.add(self.rank)
        return (LeaveGroup(),)

    def receive(self, peer: int, message: WaveMessage) -> None:
        """A message of rank ``peer``. Raises WaveProtocolError."""
        if isinstance(message, LeaveGroup):
            self._left.add(peer)
            return
        ahead = message.sync_round - self.sync_round
        if isinstance(message, Vote):
            if ahead not in (0, 1) or peer in self._votes[ahead] or not (self.running or ahead == 0):
                raise WaveProtocolError(f"rank {peer} sent {message}, but this rank is at {self._state()}")
            self._votes[ahead][peer] = message.has_work
            if ahead == 0:
                self._tally_votes()
        elif ahead == 0 and not self.running:
            self._begin()
        elif ahead == 1 and self.running:
            self._woken = True
        elif ahead > 0:
            raise WaveProtocolError(f"rank {peer} sent {message}, but this rank is at {self._state()}")
        # else: this rank is in that wave, or past it

    def _begin(self) -> None:
        self.running = True
        self.waves += 1

    def _tally_votes(self) -> None:
        """Come to the verdict once every vote is in."""
        votes = self._votes[0]
        if len(votes) < self.size:
            return
        go_on = any(votes.values())
        self._votes = [self._votes[1], {}]
        self.sync_round += 1
        self.steps = 0
        woken, self._woken = self._woken, False
        if not go_on:
            self.running = False
            if woken:
                self._begin()
        elif woken:
            raise WaveProtocolError(f"a peer began a new wave, but this one goes on after {self.sync_round}")

    def _state(self) -> str:
        return f"sync_round {self.sync_round}, {'running' if self.running else 'asleep'}"
