"""Images on the page: chosen, pasted, dropped, removed, scaled down, sent, kept, exported and read again."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from tests.page.visit import Visit, delta

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.integration.server import Server

CHAT = "/v1/chat/completions"
SEEING = {"data": [{"id": "m", "max_model_len": 9, "input_modalities": ["text", "image"]}]}
_GIVE = """([kind, type, name, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const init = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent("paste", { ...init, clipboardData: transfer })
    : new DragEvent("drop", { ...init, dataTransfer: transfer });
  document.querySelector(kind === "paste" ? "#prompt" : "#log").dispatchEvent(event);
  return event.defaultPrevented;
}"""


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def give(visit: Visit, kind: str, name: str, data: bytes, type: str = "image/png") -> bool:
    """Paste or drop a file; whether the page takes it."""
    return bool(visit.page.evaluate(_GIVE, [kind, type, name, base64.b64encode(data).decode()]))


def size_of(url: str) -> tuple[int, int]:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size


def sent(body: Any) -> list[tuple[int, int] | str]:
    """The content of the last message of a request: sizes of images, and texts."""
    parts = body["messages"][-1]["content"]
    return [size_of(part["image_url"]["url"]) if "image_url" in part else part["text"] for part in parts]


@pytest.fixture
def seeing(visit: Visit) -> Visit:
    """The page of a server whose model sees images."""
    visit.answer("/v1/models", SEEING)
    visit.page.reload()
    visit.wait_for_model("m")
    visit.wait_for("#picture-choose:visible")
    return visit


def test_images_are_chosen_pasted_dropped_and_removed(seeing: Visit) -> None:
    bodies = seeing.stream(CHAT, delta(content="Red."))
    files = [
        {"name": name, "mimeType": "image/png", "buffer": png(side, 8)} for side, name in ((8, "a"), (9, "b"))
    ]
    seeing.page.set_input_files("#picture-file", files)  # type: ignore[arg-type]
    seeing.wait_for("#picture-note", "Added: b")
    assert give(seeing, "paste", "c.png", png(10, 8))
    seeing.wait_for("#picture-note", "Added: c.png")
    assert give(seeing, "drop", "d.png", png(11, 8))
    seeing.wait_for("#picture-note", "Added: d.png")
    labels = seeing.find("#pictures [role=img]").evaluate_all("all => all.map((one) => one.ariaLabel)")
    assert labels == ["Image: a", "Image: b", "Image: c.png", "Image: d.png"]
    seeing.page.press("#pictures [aria-label='Remove b']", "Enter")
    assert seeing.page.evaluate("document.activeElement.id") == "prompt"
    seeing.ask("What is it?")
    seeing.wait_for_end()
    assert sent(bodies[0]) == [(8, 8), (10, 8), (11, 8), "What is it?"]
    assert not seeing.find("#pictures").is_visible()
    assert seeing.find(".message.user [role=img]").count() == 3
    seeing.page.hover(".message.user")
    seeing.page.click(".message.user .edit")
    seeing.page.fill(".editor textarea", "And now?")
    seeing.page.click("text=Send again")
    seeing.wait_for(".message.user .body", "And now?")
    seeing.wait_for_end()
    assert sent(bodies[1]) == [(8, 8), (10, 8), (11, 8), "And now?"]
    seeing.page.reload()
    seeing.wait_for(".message.user [role=img]")
    seeing.wait_for("#picture-choose:visible")
    give(seeing, "paste", "e.png", png(12, 8))
    seeing.wait_for("#picture-note", "Added: e.png")
    seeing.page.press("#prompt", "Enter")  # an image alone
    seeing.wait_for(".message >> nth=3")
    seeing.wait_for_end()
    assert sent(bodies[2]) == [(12, 8)]
    assert len(bodies[2]["messages"]) == 3


def test_what_is_very_large_is_scaled_and_what_is_no_image_is_refused(seeing: Visit) -> None:
    bodies = seeing.stream(CHAT, delta(content="Red."))
    give(seeing, "drop", "notes.png", b"text")
    seeing.wait_for(
        "#picture-note", "notes.png: not an image that this browser reads (png, jpeg, webp, gif)."
    )
    give(seeing, "drop", "wide.png", png(5000, 4100))
    seeing.wait_for("#picture-note", "Added: wide.png")
    seeing.ask("")
    seeing.wait_for(".message.assistant")
    seeing.wait_for_end()
    [(width, height)] = sent(bodies[0])
    assert 19_000_000 < width * height <= 20_010_000  # type: ignore[operator]
    assert bodies[0]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")


def test_a_conversation_with_images_is_exported_and_read_again(seeing: Visit, tmp_path: Path) -> None:
    bodies = seeing.stream(CHAT, delta(content="Red."))
    url = f"data:image/png;base64,{base64.b64encode(png(8, 8)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Look."}]
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"title": "T", "messages": [{"role": "user", "content": content}]}))
    seeing.page.set_input_files("#history-file", str(file))
    seeing.wait_for(".message.user [role=img]")
    assert seeing.find(".message.user .body").inner_text() == "Look."
    seeing.page.click("text=Try again")
    seeing.wait_for(".message.assistant")
    seeing.wait_for_end()
    assert bodies[0]["messages"][0]["content"] == content


def test_a_model_of_text_is_offered_none(visit: Visit, browser: Browser, server: Server) -> None:
    visit.wait_ready()
    visit.wait_for_model("penstock-demo")
    assert not visit.find("#picture-choose").is_visible()
    assert not give(visit, "paste", "a.png", png(8, 8))
