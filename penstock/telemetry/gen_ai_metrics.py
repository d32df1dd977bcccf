"""Histograms of OpenTelemetry's semantic conventions for generative AI, as they are given to an exporter.

Names, units, buckets and attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.telemetry.spans import Attribute, present


@dataclass(frozen=True, slots=True)
class GenAiHistogram:
    """One metric. ``bounds``: upper bounds of buckets, inclusive, ascending, as the conventions advise."""

    name: str
    unit: str
    help: str
    bounds: tuple[float, ...]


REQUEST_DURATION = GenAiHistogram(
    "gen_ai.server.request.duration",
    "s",
    "From a request's arrival to the end of its reply.",
    tuple(0.01 * (1 << power) for power in range(14)),
)
TIME_TO_FIRST_TOKEN = GenAiHistogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From a request's arrival to its first token, of requests that succeed.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = GenAiHistogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time per token after the first one, of requests that succeed.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
TOKEN_USAGE = GenAiHistogram(
    "gen_ai.client.token.usage",
    "{token}",
    "Tokens of a request, by gen_ai.token.type: input or output.",
    tuple(float(4**power) for power in range(14)),
)
GEN_AI_HISTOGRAMS = (REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, TOKEN_USAGE)

API_OPERATIONS = {
    "completions": ("text_completion", "openai"),
    "chat": ("chat", "openai"),
    "responses": ("chat", "openai"),
    "messages": ("chat", "anthropic"),
    "gemini": ("generate_content", "gcp.gemini"),
    "ollama": ("chat", "ollama"),
    "generate": ("text_completion", "vllm"),
    "sglang": ("text_completion", "sglang"),
    "embeddings": ("embeddings", "openai"),
    "cohere": ("embeddings", "cohere"),
}
"""gen_ai.operation.name and gen_ai.provider.name by API: whose API it is."""


class Point(NamedTuple):
    """What a histogram has counted for some attributes. Several with equal ones are added up."""

    metric: GenAiHistogram
    attributes: dict[str, Attribute]
    counts: tuple[int, ...]
    """Observations per bucket of the metric's bounds, then those above all bounds."""
    total: float


def request_attributes(
    api: str, request_model: str, response_model: str, error: str | None = None, token_type: str | None = None
) -> dict[str, Attribute] | None:
    """Attributes of requests of an API; None: they are no operation of generative AI. ``error``: why they
    failed, or None. A model that is not known is empty."""
    if (operation := API_OPERATIONS.get(api)) is None:
        return None
    return present(
        {
            "gen_ai.operation.name": operation[0],
            "gen_ai.provider.name": operation[1],
            "gen_ai.request.model": request_model or None,
            "gen_ai.response.model": response_model or None,
            "error.type": error,
            "gen_ai.token.type": token_type,
        }
    )


def added_up(points: Iterable[Point]) -> dict[GenAiHistogram, list[Point]]:
    """Points by metric, one for each set of attributes."""
    found: dict[GenAiHistogram, dict[tuple[tuple[str, Attribute], ...], Point]] = {}
    for point in points:
        series = found.setdefault(point.metric, {})
        key = tuple(sorted(point.attributes.items()))
        if (known := series.get(key)) is not None:
            counts = tuple(a + b for a, b in zip(known.counts, point.counts, strict=True))
            point = point._replace(counts=counts, total=known.total + point.total)
        series[key] = point
    return {metric: list(series.values()) for metric, series in found.items()}
