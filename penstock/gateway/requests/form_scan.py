"""Looks for the model in a form that has come in part."""

from __future__ import annotations

from penstock.gateway.requests.model_field import MAX_PART_HEADERS, form_delimiter, names_model


class FormScan:
    """Follows the parts of a form as it grows, each byte once. ``kind``: its content type."""

    def __init__(self, kind: bytes) -> None:
        self._delimiter = form_delimiter(kind) or b""
        self._at = len(self._delimiter)
        """Where the headers of the current part begin."""
        self._searched: int | None = None
        """From where on its end is searched; None: its headers are incomplete."""
        self._is_model = False
        self.done = not self._delimiter
        """The model has been found, or none can be: the form has ended, or is malformed."""

    def feed(self, raw: bytearray) -> None:
        """``raw``: all that has come."""
        if len(raw) >= len(self._delimiter) and not raw.startswith(self._delimiter):
            self.done = True
        while not self.done and len(raw) >= self._at + 2:
            if self._searched is None and not self._read_head(raw):
                return
            assert self._searched is not None
            end = raw.find(b"\r\n" + self._delimiter, self._searched)
            if end < 0:
                self._searched = max(self._searched, len(raw) - len(self._delimiter) - 1)
                return
            self.done = self._is_model
            self._at, self._searched = end + 2 + len(self._delimiter), None

    def _read_head(self, raw: bytearray) -> bool:
        """Read the headers of a part; returns whether they are complete."""
        if not raw.startswith(b"\r\n", self._at):
            self.done = True
            return False
        head = raw.find(b"\r\n\r\n", self._at, self._at + MAX_PART_HEADERS)
        if head < 0:
            self.done = len(raw) >= self._at + MAX_PART_HEADERS
            return False
        self._is_model = names_model(bytes(raw[self._at : head]))
        self._searched = head + 2
        return True
