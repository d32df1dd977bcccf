"""What to write where a model is for vLLM's engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from penstock.config.errors import NeedsVllm
from penstock.config.introspect import options_of
from penstock.config.other_servers.review import GivenFlag, Review
from penstock.distribution import pip_install


def advice(
    error: NeedsVllm, given: Sequence[GivenFlag], argv: Sequence[str], program: str, config: type
) -> str:
    """The command line of ``program`` for vLLM's engine, with ``argv`` and flags ``given`` for other servers,
    and how that engine is installed where it is not."""
    options = options_of(config)
    review = Review(given, "torch", {option.flag for option in options})
    text = f"Write: {review.line_for_vllm(program, argv, options, error.behind)}"
    named = any(token.replace("_", "-").startswith("--vllm-command") for token in argv)
    if not named and importlib.util.find_spec("vllm") is None:
        text += (
            f"\nvLLM is not installed here; run {pip_install('vllm')}, or name another environment's with "
            "--vllm-command"
        )
    return text
