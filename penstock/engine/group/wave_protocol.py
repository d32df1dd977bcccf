"""The wave protocol of data-parallel ranks: waves of steps that all ranks run together. No I/O.

A model whose experts are split over the ranks computes a layer only when every rank computes it, so an idle
rank must run dummy steps while another one has work. A *wave* is a sequence of steps that all ranks run.
Between waves the ranks are asleep.

- A sleeping rank that gets work starts a wave and sends StartWave to its peers, which join at once.
- After every ``interval`` steps there is a *sync round*: each rank tells its peers whether it has work (Vote)
  and waits for their votes. All ranks see the same votes and make the same decision: continue if any rank has
  work, sleep otherwise.

Sync rounds are numbered from 0 for the group's lifetime, and every rank has made the same number of steps
before each of them. A wave is identified by the number of its first sync round. So a late StartWave can be
told from a timely one, and work that arrives between a vote and its decision is not lost: it starts the next
wave. A peer can be one sync round ahead, never two, because it needs this rank's vote for the next one.

A rank that ends sends LeaveGroup, has no work from then on, and stays until all others have sent it too and
no wave is running: a rank that starts a wave finds all ranks there.

Messages (:mod:`penstock.wire.waves`) from one rank to another arrive in order, or the connection breaks and
the group with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.wire.waves import LeaveGroup, StartWave, Vote, WaveMessage


class WaveProtocolError(RuntimeError):
    """A peer sent a message that is impossible in this state: the group is broken."""


@dataclass(slots=True)
class WaveProtocol:
    """One rank of ``size``. Each method returns the messages to send to every peer, in order.

    The engine loop calls :meth:`before_step`, steps if :attr:`may_step` (a dummy step when the rank has no
    work), and calls :meth:`on_step` after the step.
    """

    rank: int
    size: int
    interval: int
    """Steps from one sync round to the next; the same on every rank."""
    sync_round: int = 0
    """Number of the next sync round: it comes after ``(sync_round + 1) * interval`` steps of the group."""
    running: bool = False
    """Whether a wave is running."""
    steps: int = 0
    """Steps since the last sync round, 0 to ``interval``."""
    waves: int = 0
    """Waves started."""
    _woken: bool = False
    """A peer has started the wave after this one, whose end is not known here yet."""
    _votes: list[dict[int, bool]] = field(default_factory=lambda: [{}, {}])
    """Votes by rank, for ``sync_round`` and for the one after it."""
    _left: set[int] = field(default_factory=set)
    """Ranks that have sent LeaveGroup."""

    @property
    def may_step(self) -> bool:
        return self.running and self.steps < self.interval

    @property
    def may_exit(self) -> bool:
        """Whether all ranks are leaving and no wave is running."""
        return len(self._left) == self.size and not self.running

    def before_step(self, has_work: bool) -> Sequence[WaveMessage]:
        """Start a wave if this rank is asleep and has work."""
        if self.running or not has_work:
            return ()
        self._begin()
        return (StartWave(self.sync_round),)

    def on_step(self, has_work: bool) -> Sequence[WaveMessage]:
        """A step was made, dummy or not; ``has_work``: whether this rank has more work."""
        assert self.may_step, "a step that the other ranks do not make"
        self.steps += 1
        if self.steps < self.interval:
            return ()
        vote = Vote(self.sync_round, has_work)
        self._votes[0][self.rank] = has_work
        self._tally_votes()
        return (vote,)

    def leave(self) -> Sequence[WaveMessage]:
        """This rank is ending and has no work from here on."""
        self._left.add(self.rank)
        return (LeaveGroup(),)

    def receive(self, peer: int, message: WaveMessage) -> None:
        """Handle a message of rank ``peer``. Raises WaveProtocolError."""
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
        # else: this rank is in that wave already, or past it

    def _begin(self) -> None:
        self.running = True
        self.waves += 1

    def _tally_votes(self) -> None:
        """Decide whether the wave continues, once every vote is in."""
        votes = self._votes[0]
        if len(votes) < self.size:
            return
        has_work = any(votes.values())
        self._votes = [self._votes[1], {}]
        self.sync_round += 1
        self.steps = 0
        woken, self._woken = self._woken, False
        if not has_work:
            self.running = False
            if woken:
                self._begin()
        elif woken:
            raise WaveProtocolError(
                f"a peer started a new wave, but this one continues after sync round {self.sync_round - 1}"
            )

    def _state(self) -> str:
        return f"sync round {self.sync_round}, {'running' if self.running else 'asleep'}"
