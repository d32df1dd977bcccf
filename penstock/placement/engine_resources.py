"""Resources that an engine reserves on a Ray machine: ``--engine-resources``."""

from __future__ import annotations

from penstock.config.serve import ServeConfig


def resources_of(config: ServeConfig) -> dict[str, float]:
    """Ray's resource name (CPU, GPU or a custom one) → amount.

    Without --engine-resources one CPU, and one GPU unless the engine needs none.
    """
    if config.engine_resources is not None:
        pairs = (pair.split("=") for pair in config.engine_resources.split(","))
        return {name: float(amount) for name, amount in pairs}
    without_gpu = config.device == "cpu" or config.engine == "synthetic"
    return {"CPU": 1.0} if without_gpu else {"CPU": 1.0, "GPU": 1.0}
