"""``--scorers``: what the choice of an endpoint weighs."""

from __future__ import annotations

from penstock.config.errors import ConfigError
from penstock.gateway.models.model_routes import parse_weight
from penstock.gateway.routing.picker import SCORERS


def read_weights(text: str, ttft_slo_s: float | None) -> dict[str, float]:
    """Weights of ``--scorers`` (NAME=WEIGHT,…) by name. Raises ConfigError for an unknown name, a bad
    number, and when only one of ``--ttft-slo`` and the scorer ``slo`` is given."""
    weights: dict[str, float] = {}
    for pair in text.split(","):
        name, _, weight = pair.partition("=")
        if name not in SCORERS:
            raise ConfigError(f"--scorers {pair}: there is no scorer {name!r}, but {', '.join(SCORERS)}")
        if name in weights:
            raise ConfigError(f"--scorers {text}: {name} is given twice")
        weights[name] = parse_weight(weight, f"--scorers {pair}")
    if weights.get("slo") and ttft_slo_s is None:
        raise ConfigError("--scorers slo=…: the scorer slo needs --ttft-slo")
    if ttft_slo_s is not None and not weights.get("slo"):
        raise ConfigError(f"--ttft-slo {ttft_slo_s:g}: the scorer that uses it, slo, is not in --scorers")
    return weights
