"""Histogram buckets: upper bounds, inclusive, ascending."""

from __future__ import annotations

# In seconds. Those of vLLM's metrics of the same names, so that dashboards fit.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
EVENT_BOUNDS = (*(float(1 << power) for power in range(11)),)
"""Tokens per event, up to the largest ``--stream-interval``."""
TOKEN_BOUNDS = (*(digit * 10.0**power for power in range(6) for digit in (1, 2, 5)), 1e6)
