"""What measuring commands fail with."""


class BenchError(Exception):
    """A measurement that cannot be made; the message is for the user."""
