"""Where the pictures of a request are, and what is prepared of them."""

from __future__ import annotations

from typing import NamedTuple

DETAILS = ("auto", "low", "high", "original")
"""OpenAI's values of ``detail``."""


class ImageSource(NamedTuple):
    """One picture of a request, in the order in which the prompt shows them."""

    field: str
    """Path of its URL or data in the request, for errors: ``messages[0].content[1].image_url.url``."""
    url: str
    """data:, http:, https: or file: URL. Pictures that an API sends as bare base64 become data: URLs."""
    detail: str = "auto"
