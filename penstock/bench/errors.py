"""The error of the bench commands."""

from __future__ import annotations


class BenchError(Exception):
    """The measurement is impossible. The message is for the user."""
