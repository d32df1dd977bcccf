"""Penstock: serve large language models over the OpenAI HTTP API to thousands of concurrent streams."""

__version__ = "0.1.0"
