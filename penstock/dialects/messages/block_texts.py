"""What the model reads of a block: its text, or that there is something it cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.dialects.messages.request_schema import ContentBlock, InnerBlock
from penstock.generation.request.schemas import Part
from penstock.generation.request.unsupported_content import IMAGE_FOLLOWS, UnsupportedContent
from penstock.http.errors import ApiError, shown


class BlockTexts:
    """Texts of the blocks of one conversation. Methods raise ApiError."""

    def __init__(self, unsupported: UnsupportedContent, *, sees_images: bool = False) -> None:
        """``unsupported`` notes what the model cannot see. ``sees_images``: images in content stay images."""
        self.unsupported = unsupported
        self._sees_images = sees_images

    def content(self, block: ContentBlock | InnerBlock, field: str) -> str | Part:
        """What the model reads of a block, or the image that it sees."""
        if block.type == "image" and self._sees_images and (url := _image_url(block.source)) is not None:
            return Part(type="image_url", image_url={"url": url})
        return self.text(block, field)

    def result(self, blocks: Sequence[InnerBlock], field: str) -> tuple[str, list[Part]]:
        """The text of a tool's result, and the images in it: results of chat completions have texts alone."""
        contents = [self.content(block, f"{field}.content[{at}]") for at, block in enumerate(blocks)]
        texts = [IMAGE_FOLLOWS if isinstance(each, Part) else each for each in contents]
        return "\n".join(texts), [each for each in contents if isinstance(each, Part)]

    def joined(self, blocks: Sequence[ContentBlock | InnerBlock], field: str) -> str:
        return "\n".join(self.text(block, f"{field}.content[{at}]") for at, block in enumerate(blocks))

    def text(self, block: ContentBlock | InnerBlock, field: str) -> str:
        match block.type:
            case "text":
                return _needed(block.text, f"{field}.text")
            case "image":
                return self.unsupported.add("image", field)
            case "document":
                texts = [block.context, self._document(block.source, f"{field}.source")]
                return _tagged("document", block.title, texts)
            case "search_result":
                return _tagged("search_result", block.title, self._found(block, field))
            case "tool_reference":  # of a tool with defer_loading, which the model sees anyway
                return f"Tool: {_needed(block.tool_name, f'{field}.tool_name')}"
        raise unsupported(block.type, field)

    def _document(self, source: Any, field: str) -> str:
        match source:
            case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
                return text
            case {"type": "content", "content": list(parts)}:
                return "\n".join(self._part(part, f"{field}.content[{at}]") for at, part in enumerate(parts))
            case {"type": "base64" | "url" | "file"}:
                return self.unsupported.add("document", field)
        kind = source.get("type") if isinstance(source, dict) else None
        raise ApiError(
            400,
            f"{field}: documents of type {shown(kind)!r} are not supported, only text, content, base64, url "
            "and file.",
            param=field,
        )

    def _found(self, block: ContentBlock | InnerBlock, field: str) -> list[str | None]:
        source = f"Source: {block.source}" if isinstance(block.source, str) else None
        parts = block.content if isinstance(block.content, list) else []
        return [source, *(self._part(part, f"{field}.content[{at}]") for at, part in enumerate(parts))]

    def _part(self, part: Any, field: str) -> str:
        if isinstance(part, InnerBlock):
            part = {"type": part.type, "text": part.text}
        match part:
            case {"type": "text", "text": str(text)}:
                return text
            case {"type": "text"}:
                raise ApiError(400, f"{field}.text must be a text.", param=f"{field}.text")
            case {"type": "image"}:
                return self.unsupported.add("image", field)
        raise unsupported(part.get("type") if isinstance(part, dict) else None, field)


def _image_url(source: Any) -> str | None:
    """The URL of an image; None: it is somewhere else, such as in files of Anthropic's."""
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    return None


def unsupported(kind: Any, field: str) -> ApiError:
    return ApiError(
        400,
        f"{field}: blocks of type {shown(kind)!r} are not supported by this server, which takes text only.",
        param=field,
    )


def _tagged(tag: str, title: str | None, texts: Sequence[str | None]) -> str:
    named = f' title="{title}"' if title else ""
    return f"<{tag}{named}>\n" + "\n".join(filter(None, texts)) + f"\n</{tag}>"


def _needed(value: str | None, field: str) -> str:
    if value is None:
        raise ApiError(400, f"{field} is missing.", param=field)
    return value
