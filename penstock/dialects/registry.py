"""The list of APIs that a server offers; a new API is added here."""

from __future__ import annotations

from penstock.config.serve import ServeConfig
from penstock.dialects.chat import openapi as chat
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.completions import openapi as completions
from penstock.dialects.completions.dialect import Completions
from penstock.generation.dialect import Dialect
from penstock.generation.input_processor import InputProcessor


def make_dialects(config: ServeConfig, processor: InputProcessor) -> list[Dialect]:
    """One dialect per API."""
    return [Completions(config, processor), ChatCompletions(config, processor)]


DESCRIPTIONS = (completions.DESCRIPTION, chat.DESCRIPTION)
"""One entry per API, for the OpenAPI document."""
