"""Where the pictures of a request are. What is wrong with their files is found where they are prepared."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from penstock.http.errors import ApiError, refused

DETAILS = ("auto", "low", "high", "original")
"""OpenAI's values of ``detail``."""


class ImageSource(NamedTuple):
    """One picture of a request, in the order in which the prompt shows them."""

    field: str
    """Path of its URL or data in the request, for errors: ``messages[0].content[1].image_url.url``."""
    url: str
    """data:, http:, https: or file: URL. Pictures that an API sends as bare base64 become data: URLs."""
    detail: str = "auto"


_HEAD = 256
"""Characters of a URL that are looked at: its rest may be millions."""
_TYPE = re.compile(r"(image(/(?!svg)[\w.+*-]+)?|application/octet-stream)?", re.ASCII | re.IGNORECASE)
"""What a picture is said to be; its first bytes decide. Qwen's examples write ``data:image;base64,…``."""
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\s-]+")
_TYPES = "image/png, image/jpeg, image/webp, image/gif or image/bmp"
_URLS = "a data: URL with base64, such as data:image/png;base64,iVBORw0…, or an https: or http: URL"


def image_at(url: Any, field: str, detail: Any = None, detail_field: str = "") -> ImageSource:
    """The picture of a URL. ``field``, ``detail_field``: the paths of the values. Raises ApiError."""
    if detail is not None and detail not in DETAILS:
        raise refused(f"{detail_field} must be one of {', '.join(DETAILS)}.", detail_field, detail)
    if not isinstance(url, str) or not url:
        raise refused(f"{field} must be {_URLS}.", field, "" if url is None else url)
    head = url[:_HEAD]
    scheme = head.partition(":")[0].lower()
    if scheme == "data":
        kind, comma, data = head[5:].partition(",")
        kind, marked, _ = kind.partition(";base64")
        if not comma or not marked:
            raise refused(f"{field} must be {_URLS}.", field, head[:_SHOWN])
        _check(kind.partition(";")[0], field, data, field)
    elif scheme not in ("http", "https", "file"):
        # What follows a scheme may have credentials.
        place, slashes, _ = head[:_SHOWN].partition("//")
        raise refused(f"{field} must be {_URLS}.", field, place + slashes)
    return ImageSource(field, url, detail or "auto")


_SHOWN = 40
"""Characters of a wrong URL in an error."""


def image_of(data: Any, field: str, kind: Any = "", kind_field: str = "") -> ImageSource:
    """The picture of a text of base64; ``kind``: its media type, if the API says it. Raises ApiError."""
    if not isinstance(kind, str):
        raise refused(f"{kind_field} must be {_TYPES}.", kind_field, kind)
    if not isinstance(data, str):
        raise refused(f"{field} must be the base64 of an image.", field, data)
    _check(kind, kind_field, data[:_HEAD], field)
    return ImageSource(field, f"data:{kind};base64,{data}")


def _check(kind: str, kind_field: str, data: str, field: str) -> None:
    if not _TYPE.fullmatch(kind):
        raise refused(f"{kind_field}: images must be {_TYPES}.", kind_field, kind)
    if not _BASE64.fullmatch(data):
        raise ApiError(
            400, f"{field} has no base64 of an image: its data begin with {data[:_SHOWN]!r}.", param=field
        )
