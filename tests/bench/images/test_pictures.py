"""The pictures of ``penstock bench images``, and what becomes of the requests that have them."""

from __future__ import annotations

import base64
import http.server
import io
import threading
from collections.abc import Iterator

import msgspec
import pytest

from penstock.bench.errors import BenchError
from penstock.bench.images.picture_load import DIED, PictureLoad
from penstock.bench.images.pictures import Png, jpeg_url, picture_body, side_of, text_body


def test_files_differ_and_are_the_same_picture() -> None:
    from PIL import Image  # imported with what needs it

    png = Png(0.05)
    files = [base64.b64decode(url.partition(b",")[2]) for url in (png.url(1), png.url(2), jpeg_url(0.05))]
    one, two, jpeg = (Image.open(io.BytesIO(each)) for each in files)
    assert files[0] != files[1]
    assert one.tobytes() == two.tobytes()
    assert one.size == jpeg.size == (side_of(0.05),) * 2
    assert one.mode == "RGB"


def test_bodies() -> None:
    body = msgspec.json.decode(picture_body("m", b"data:,x", tokens=3))
    assert body["max_tokens"] == 3
    assert body["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert msgspec.json.decode(text_body("m", "hi"))["messages"][0]["content"] == "hi"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the status in the body; 0: not at all."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        status = int(self.rfile.read(int(self.headers["content-length"])))
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_every_request_has_an_outcome(url: str) -> None:
    def body(number: int) -> bytes:
        return (b"200", b"503", b"0", b"200")[number % 4]

    with PictureLoad(url, body, 3, count=8) as posts:
        posts.wait(30)
    assert posts.outcomes == {"200": 4, "503": 2, DIED: 2}
    with pytest.raises(BenchError, match="503"):
        posts.check()


def test_a_load_goes_on_until_it_is_closed(url: str) -> None:
    enough = threading.Event()

    def body(number: int) -> bytes:
        if number > 20:
            enough.set()
        return b"200"

    with PictureLoad(url, body, 2) as posts:
        assert enough.wait(30)
    posts.check()
    assert posts.outcomes["200"] > 20
