"""``--model-rewrite``: replaces the model that a request names by one drawn by weight."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from penstock.config.errors import ConfigError
from penstock.gateway.requests.request_body import RequestBody


def parse_weight(text: str, option: str) -> float:
    """The weight in ``text``, a part of the value of ``option``. Raises ConfigError."""
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a number") from None
    if not 0 <= weight < math.inf:
        raise ConfigError(f"{option}: the weight {text} is not allowed; it must be finite and at least 0")
    return weight


class ModelRewrites:
    """The replacements of each model name, with their weights."""

    def __init__(self, texts: Sequence[str], rng: random.Random | None = None) -> None:
        """``texts`` are ``NAME=MODEL[:WEIGHT],…`` each. Raises ConfigError."""
        self._rng = rng or random.Random()
        self._targets: dict[str, tuple[list[str], list[float]]] = {}
        for text in texts:
            option = f"--model-rewrite {text}"
            name, _, targets = text.partition("=")
            pairs = [target.partition(":") for target in targets.split(",")]
            weights = [parse_weight(weight or "1", option) for _, _, weight in pairs]
            if not any(weights):
                raise ConfigError(f"{option}: all weights are 0")
            if name in self._targets:
                raise ConfigError(f"{option}: {name} is rewritten already; give all its models at once")
            self._targets[name] = [model for model, _, _ in pairs], weights

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every pair of a name and a model that replaces it."""
        for name, (models, _) in self._targets.items():
            for model in models:
                yield name, model

    def apply(self, body: RequestBody) -> RequestBody:
        """The request for the model drawn, or ``body`` itself when its model is not rewritten."""
        targets = self._targets.get(body.model)
        return body if targets is None else body.with_model(self._rng.choices(*targets)[0])
