"""Applies the desired states, such as sleep, to an engine, between its steps. No I/O.

    observed ──a later generation──► applying ──► observed
                                        │  ▲
                                        ▼  │ a later generation, or every RETRY_S if this one holds
                                       failed

Every API server sends the states; the latest generation counts, so each is applied once. A generation that
does not hold yet and cannot be applied leaves the engine as it was: the supervisor sets an earlier value
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.config.errors import ConfigError
from penstock.engine.weights.weight_loader import BrokenWeights
from penstock.logging_setup import RateLimitedLog
from penstock.wire.messages import DesiredState, ObservedState, StatesObserved

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between two attempts to apply a state that holds."""


class StateApplier(Protocol):
    """Applies one state to an engine."""

    name: str
    default: Mapping[str, Any]
    """The value of a state that was never set."""

    def prepare(self, value: dict[str, Any]) -> None:
        """Begin the part of a change that may fail or take time. A failed prepare changes nothing. Raises
        ValueError."""
        ...

    def prepared(self, *, firm: bool) -> bool:
        """Whether :meth:`commit` could run now. ``firm``: the value is applied as far as it can be. Otherwise
        raises ValueError when it cannot be applied."""
        ...

    def commit(self, generation: int) -> None:
        """Make the prepared change, which is of that generation."""
        ...

    def settle(self) -> None:
        """Forget what the engine had before the change: the value holds."""
        ...

    def abort(self) -> None:
        """Undo :meth:`prepare`."""
        ...

    def result(self) -> Any:
        """What the state is."""
        ...


class _AppliedState:
    """One state of the engine."""

    def __init__(self, applier: StateApplier) -> None:
        self._applier = applier
        self._warn = RateLimitedLog(log, logging.ERROR)
        self._tell = RateLimitedLog(log)
        self.desired: DesiredState | None = None
        self.observed: ObservedState | None = None
        self._prepared = False
        self._apply_at: float | None = None
        """From when on to apply ``desired``; None: that is done, or of no use."""

    def desire(self, state: DesiredState) -> None:
        """Apply a state unless a later generation is known."""
        earlier = self.desired
        if earlier is None or earlier.generation < state.generation:
            self._abort()
            self.desired, self._apply_at = state, 0.0
        elif earlier.generation == state.generation and state.is_firm and not earlier.is_firm:
            self.desired = state
            if self.observed is not None and self.observed.generation == state.generation:
                self._hold(self.observed)

    def advance(self, step: int, now: float) -> bool:
        """Apply what is desired if that is possible now; return whether anything was observed."""
        state = self.desired
        if state is None or self._apply_at is None or now < self._apply_at:
            return False
        try:
            if not self._try_to_apply(state):
                return False
            error = None
        except BrokenWeights:
            raise
        except (ValueError, ConfigError) as refusal:
            error = str(refusal)
        except Exception as failure:  # noqa: BLE001 - the change fails, not the engine
            error = f"{type(failure).__name__}: {failure}"
            self._warn(state.name, "%s cannot be applied", state.name, exc_info=True)
        self._abort()  # if it has failed; otherwise nothing is prepared any more
        self.observed = ObservedState(state.name, state.generation, error, self._applier.result(), step)
        if state.is_firm:
            self._hold(self.observed, now + RETRY_S)
            if error is not None:
                self._tell(error, "%s cannot be applied and is tried again: %s", state.name, error)
        return True

    def forget(self) -> None:
        """Go back to the default, if there was anything else, and take any generation as a later one."""
        if self.desired is not None:
            self.desired = self.observed = None
            self.desire(DesiredState(self._applier.name, 0, {}, settled=True))

    def _try_to_apply(self, state: DesiredState) -> bool:
        """Return whether it is applied. Raises what the applier does."""
        if not self._prepared:
            self._applier.prepare(state.value or dict(self._applier.default))
            self._prepared = True
        if not self._applier.prepared(firm=state.is_firm):
            return False
        self._prepared = False
        self._applier.commit(state.generation)
        return True

    def _hold(self, observed: ObservedState, retry_at: float = 0.0) -> None:
        """The generation, which has been tried, holds."""
        if observed.error is None:
            self._applier.settle()
        else:
            self._apply_at = retry_at

    def _abort(self) -> None:
        """Give up what is prepared."""
        self._apply_at = None
        if self._prepared:
            self._prepared = False
            try:
                self._applier.abort()
            except Exception:  # noqa: BLE001 - the engine stays in its state
                self._warn(self._applier.name, "%s cannot be undone", self._applier.name, exc_info=True)


class StateReconciler:
    """The states of one engine."""

    def __init__(
        self,
        appliers: Sequence[StateApplier],
        reply: Callable[[int, StatesObserved], None],
        report: Callable[[StatesObserved], None],
        step: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """``reply`` sends to an API server, ``report`` to all. ``step`` returns the number of published
        steps."""
        self._states = {applier.name: _AppliedState(applier) for applier in appliers}
        self._reply = reply
        self._report = report
        self._step = step
        self._clock = clock

    def apply(self, server: int, states: Sequence[DesiredState]) -> None:
        """An API server sent the desired states; it gets what is observed by then."""
        unknown = []
        for state in states:
            applied = self._states.get(state.name)
            if applied is None:
                error = f"this engine has no state {state.name!r}"
                unknown.append(ObservedState(state.name, state.generation, error))
            else:
                applied.desire(state)
        self.advance()
        self._reply(server, StatesObserved([*self._observed(), *unknown]))

    def advance(self) -> None:
        """Finish what can be finished, and tell every API server of it."""
        changed = [state.advance(self._step(), self._clock()) for state in self._states.values()]
        if any(changed):
            self._report(StatesObserved(self._observed()))

    def forget(self) -> None:
        """The API servers of another head come, which numbers its generations from the beginning and knows
        nothing of what was set."""
        for state in self._states.values():
            state.forget()

    def _observed(self) -> list[ObservedState]:
        return [state.observed for state in self._states.values() if state.observed is not None]
