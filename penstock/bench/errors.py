"""What measuring commands fail with."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement that cannot be made; the message is for the user."""
