"""Penstock: serve large language models over the OpenAI HTTP API to thousands of concurrent streams."""

from __future__ import annotations

__version__ = "0.1.0"
