"""Options of the synthetic engine."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option, option_group

STEP_MS = "Step duration of the synthetic engine, in milliseconds."
TOKENS_PER_STEP = (
    "Maximum tokens per stream and step of the synthetic engine, as speculative decoding makes them. The "
    "tokens of a stream do not depend on it."
)
MAX_TOKENS_PER_STEP = 64


@option_group
class SyntheticOptions:
    """Options of the synthetic engine."""

    synthetic_step_ms: Annotated[float, option(STEP_MS, "Synthetic engine", ge=0)] = 10.0
    synthetic_tokens_per_step: Annotated[
        int, option(TOKENS_PER_STEP, "Synthetic engine", ge=1, le=MAX_TOKENS_PER_STEP)
    ] = 1
    synthetic_acceptance_rate: Annotated[
        float,
        option(
            "With --synthetic-tokens-per-step: probability that a step has the next token, once it has all "
            "before. 1: every step has the maximum, except a stream's first, which has one token.",
            "Synthetic engine",
            ge=0,
            le=1,
        ),
    ] = 1.0
    synthetic_prefill_tokens_per_s: Annotated[
        float,
        option(
            "Prefill speed of the synthetic engine, in tokens per second; 0: no limit.",
            "Synthetic engine",
            ge=0,
        ),
    ] = 0.0
    synthetic_dimensions: Annotated[
        int,
        option(
            "With --runner pooling or both: values of a vector of the synthetic engine.",
            "Synthetic engine",
            ge=1,
            le=65536,
        ),
    ] = 384
    synthetic_labels: Annotated[
        int,
        option(
            "With --runner pooling or both: labels of the synthetic engine's classifier; one makes it a "
            "cross-encoder.",
            "Synthetic engine",
            ge=1,
            le=65536,
        ),
    ] = 1
    synthetic_image_tokens: Annotated[
        int,
        option(
            "Maximum tokens of a picture, which has one for each square of 28 pixels; 0: the synthetic "
            "engine takes text only.",
            "Synthetic engine",
            ge=0,
            le=65536,
        ),
    ] = 0
    synthetic_encode_ms: Annotated[
        float,
        option(
            "Time in which the synthetic engine encodes a picture, in milliseconds.", "Synthetic engine", ge=0
        ),
    ] = 0.0
    synthetic_fault: Annotated[
        Annotated[str, Meta(pattern=r"^(error|exit|hang|stream-error)@[0-9]+\Z")] | None,
        option(
            "Fault to inject, KIND@STEP: error (an exception), exit (the process ends), hang, or "
            "stream-error (the oldest stream fails). STEP: index of a step with work; the first is 0.",
            "Synthetic engine",
            allowed="KIND@STEP, KIND one of error, exit, hang and stream-error",
        ),
    ] = None
    synthetic_script: Annotated[
        str | None,
        option(
            "YAML or JSON file with rules by which the synthetic engine answers prompts: texts, tool calls, "
            "reasoning, delays, failures.",
            "Synthetic engine",
            metavar="FILE",
        ),
    ] = None
