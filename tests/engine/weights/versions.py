"""What an API server receives, with the generation of each token."""

from __future__ import annotations

from penstock.wire.frames import TokenFrame
from penstock.wire.messages import WEIGHTS, ObservedState, StatesObserved
from tests.engine.support import Received


class Versions(Received):
    """Also notes which generation each token is of, and checks that it had been told before."""

    def __init__(self) -> None:
        super().__init__()
        self.generations: dict[int, list[int]] = {}
        self.observed: list[ObservedState] = []

    def frame(self, frame: TokenFrame) -> None:
        told = max((state.result["generation"] for state in self.observed), default=0)  # type: ignore[type-var]
        assert frame.weights == told, "rows of weights that were not told before"
        before = {stream: len(tokens) for stream, tokens in self.tokens.items()}
        super().frame(frame)
        for stream, tokens in self.tokens.items():
            new = len(tokens) - before.get(stream, 0)
            self.generations.setdefault(stream, []).extend([frame.weights] * new)

    def parts(self, parts: list[bytes]) -> None:
        super().parts(parts)
        for message in self.others:
            if isinstance(message, StatesObserved):
                self.observed += [state for state in message.states if state.name == WEIGHTS]
        self.others = [message for message in self.others if not isinstance(message, StatesObserved)]
