"""What the model reads of a block: its text, a picture, or that there is something it cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.dialects.messages.request_schema import ContentBlock, InnerBlock
from penstock.generation.media.source import image_at, image_of
from penstock.generation.request.schemas import Part
from penstock.generation.request.unsupported_content import UnsupportedContent, joined
from penstock.http.errors import ApiError, not_served, refused, shown


class BlockTexts:
    """Texts and pictures of the blocks of one conversation. Methods raise ApiError."""

    def __init__(self, content: UnsupportedContent) -> None:
        """``content`` notes pictures, and what the model cannot see."""
        self.unsupported = content

    def joined(self, blocks: Sequence[ContentBlock | InnerBlock], field: str) -> str | list[str | Part]:
        """What the model reads of several blocks."""
        places = enumerate(blocks)
        return joined(
            [each for at, block in places for each in self.contents(block, f"{field}.content[{at}]")]
        )

    def contents(self, block: ContentBlock | InnerBlock, field: str) -> list[str | Part]:
        """What the model reads of a block: its text as one, and the pictures that it sees."""
        match block.type:
            case "text":
                return [_needed(block.text, f"{field}.text")]
            case "image":
                return [self._image(block.source, field)]
            case "document":
                contents = [*filter(None, [block.context]), *self._document(block.source, f"{field}.source")]
                return _tagged("document", block.title, contents)
            case "search_result":
                return _tagged("search_result", block.title, self._found(block, field))
            case "tool_reference":  # of a tool with defer_loading, which the model sees anyway
                return [f"Tool: {_needed(block.tool_name, f'{field}.tool_name')}"]
        raise unsupported(block.type, field)

    def _image(self, source: Any, field: str) -> str | Part:
        if not self.unsupported.sees_images:
            return self.unsupported.add("image", field)
        kind = source.get("type") if isinstance(source, dict) else None
        place = f"{field}.source"
        if kind == "base64":
            given, of_kind = source.get("data"), source.get("media_type")
            found = image_of(given, f"{place}.data", of_kind, f"{place}.media_type")
        elif kind == "url":
            found = image_at(source.get("url"), f"{place}.url")
        elif kind == "file":
            raise not_served(f"{place}.type", "there are no files here; send base64 or url")
        else:
            raise refused(f"{place}.type must be base64 or url.", f"{place}.type", shown(kind))
        return self.unsupported.see(found)

    def _document(self, source: Any, field: str) -> list[str | Part]:
        match source:
            case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
                return [text]
            case {"type": "content", "content": list(parts)}:
                return [self._part(part, f"{field}.content[{at}]") for at, part in enumerate(parts)]
            case {"type": "base64" | "url" | "file"}:
                return [self.unsupported.add("document", field)]
        kind = source.get("type") if isinstance(source, dict) else None
        raise ApiError(
            400,
            f"{field}: documents of type {shown(kind)!r} are not supported, only text, content, base64, url "
            "and file.",
            param=field,
        )

    def _found(self, block: ContentBlock | InnerBlock, field: str) -> list[str | Part]:
        source = [f"Source: {block.source}"] if isinstance(block.source, str) else []
        parts = block.content if isinstance(block.content, list) else []
        return [*source, *(self._part(part, f"{field}.content[{at}]") for at, part in enumerate(parts))]

    def _part(self, part: Any, field: str) -> str | Part:
        if isinstance(part, InnerBlock):
            part = {"type": part.type, "text": part.text, "source": part.source}
        match part:
            case {"type": "text", "text": str(text)}:
                return text
            case {"type": "text"}:
                raise ApiError(400, f"{field}.text must be a text.", param=f"{field}.text")
            case {"type": "image"}:
                return self._image(part.get("source"), field)
        raise unsupported(part.get("type") if isinstance(part, dict) else None, field)


def unsupported(kind: Any, field: str) -> ApiError:
    return ApiError(
        400,
        f"{field}: blocks of type {shown(kind)!r} are not supported by this server.",
        param=field,
    )


def _tagged(tag: str, title: str | None, contents: Sequence[str | Part]) -> list[str | Part]:
    named = f' title="{title}"' if title else ""
    whole = joined([f"<{tag}{named}>", *(each for each in contents if each), f"</{tag}>"])
    return [whole] if isinstance(whole, str) else whole


def _needed(value: str | None, field: str) -> str:
    if value is None:
        raise ApiError(400, f"{field} is missing.", param=field)
    return value
