"""The pictures of requests to one engine of vLLM's: ``mm_features`` of EngineCoreRequest.

vLLM keeps the values of a picture by its hash, which here is the picture's key. The first request with a
picture has its values, read from the host's store; others have the hash alone. vLLM drops values by its own
rules, and answers a request whose values it lacks with the hashes: it is sent once more, with all of them.

An engine may have been started without such a cache, and then fails at a request without values. So it is
asked first, by a request that is aborted where it arrives: only an engine with a cache says what it lacks.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.engine.base import RequestRejected
from penstock.media.store import MediaStore
from penstock.media.vllm_item import VllmItem, read_item
from penstock.wire.media.items import MediaInfo, MediaItem
from penstock.wire.messages import UNAVAILABLE, Submit
from penstock.wire.vllm.messages import ADD, encode

DEFAULT_CACHE_GB = 4.0
"""vLLM's --mm-processor-cache-gb."""
IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
"""Fields of config.json that tell the token that stands for pictures."""
MAX_KNOWN = 4096
"""Pictures whose places in vLLM's range are remembered."""
_NO_DATA = memoryview(b"")


class SentPicture(NamedTuple):
    """A picture of which vLLM was sent the values."""

    item: VllmItem
    """Without its data."""
    size: int
    """Bytes of its values."""


class AttachedPictures:
    """What one engine was sent, and its requests with pictures. Used by one thread."""

    def __init__(self, store: MediaStore, arguments: Sequence[str]) -> None:
        """``arguments``: those of ``vllm serve`` that stand behind ``--``."""
        self._store = store
        self._capacity = int(_cache_gb(arguments) * (1 << 30))
        self._by_adapter = "--enable-tower-connector-lora" in arguments
        """Whether adapters change what the encoder makes of a picture."""
        self._probe = f"cache-check-{secrets.token_hex(8)}"
        self._keeps = False
        """Whether the engine has a cache, as it has shown."""
        self._sent: OrderedDict[bytes, SentPicture] = OrderedDict()
        """Those that vLLM should have, the longest unused first."""
        self._sent_bytes = 0
        self._requests: dict[int, Submit] = {}
        """Requests with pictures, by slot."""
        self._queries = self._hits = self._missed = 0
        """Pictures of requests since the start, those that went without values, and those of them that were
        sent again."""

    def question(self) -> tuple[bytes, bytes]:
        """The frames of the request by which an engine shows that it has a cache."""
        feature = _feature(VllmItem("image", 0, 1, None, _NO_DATA), self._probe, self._probe, 0, None)
        fields = [self._probe, [0], [feature], {"max_tokens": 1, "detokenize": False}, None, time.time()]
        # to abort_immediately, the last
        fields += [None, None, None, None, None, 0, -1, 0, None, False, None, None, None, True]
        return ADD, encode(fields)

    # -- requests

    def features(
        self, slot: int, request: Submit, adapter: str | None, *, whole: bool = False
    ) -> list[dict[str, Any]] | None:
        """``mm_features`` of the slot's request, until :meth:`forget`; None: it has no pictures. ``whole``:
        with all values. Raises RequestRejected."""
        if not request.media:
            return None
        self._requests[slot] = request
        made = []
        for place, picture in enumerate(request.media):
            sent = self._sent.get(picture.key) if self._keeps and not whole else None
            if sent is None:
                item, data = self._read(picture, place), True
                self._remember(picture.key, item)
            else:
                self._sent.move_to_end(picture.key)
                item, data = sent.item, False
            self._queries += not whole
            self._hits += not data
            name = picture.key.hex()
            identifier = f"{adapter}:{name}" if self._by_adapter and adapter is not None else name
            values = msgspec.Raw(item.data) if data else None
            made.append(_feature(item, name, identifier, picture.offset, values))
        return made

    def request(self, slot: int) -> Submit | None:
        """The slot's request, if it has pictures."""
        return self._requests.get(slot)

    def forget(self, slot: int) -> None:
        """The slot's request has ended."""
        self._requests.pop(slot, None)

    # -- what vLLM has

    def missing(self, request_id: str, hashes: Sequence[Any]) -> None:
        """vLLM lacks the values of these, which a request had without."""
        if request_id == self._probe:
            self._keeps = True
            return
        for name in hashes:
            try:
                self._drop(bytes.fromhex(name))
            except (TypeError, ValueError):
                continue  # none of ours
            self._missed += 1

    def metrics(self) -> dict[str, float]:
        """As :meth:`penstock.engine.base.Engine.metrics` names them."""
        return {"mm_cache_queries_total": self._queries, "mm_cache_hits_total": self._hits - self._missed}

    def _read(self, picture: MediaItem, place: int) -> VllmItem:
        """Raises RequestRejected."""
        lease = self._store.lease(picture.key)
        if lease is None:
            raise RequestRejected(
                f"media[{place}]: the store of this engine's host does not have the picture", UNAVAILABLE
            )
        with lease:
            try:
                item = read_item(lease.pages().arrays)
            except ValueError as error:
                raise RequestRejected(f"media[{place}]: {error}") from None
        if not 0 <= item.offset <= item.offset + item.length <= picture.length:
            raise RequestRejected(f"media[{place}]: its pages are of another number of tokens")
        return item

    def _remember(self, key: bytes, item: VllmItem) -> None:
        size = len(item.data)
        self._drop(key)
        if size > self._capacity:
            return  # vLLM keeps none that large
        self._sent[key] = SentPicture(msgspec.structs.replace(item, data=_NO_DATA), size)
        self._sent_bytes += size
        while self._sent_bytes > self._capacity or len(self._sent) > MAX_KNOWN:
            self._drop(next(iter(self._sent)))

    def _drop(self, key: bytes) -> None:
        sent = self._sent.pop(key, None)
        if sent is not None:
            self._sent_bytes -= sent.size


def media_info(model_dir: str) -> MediaInfo | None:
    """What config.json says of pictures; None: the model takes none. The token is 0 where it names none:
    the pages say which tokens get features."""
    try:
        config = msgspec.json.decode(Path(model_dir, "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None
    tokens = [config[name] for name in IMAGE_TOKENS if isinstance(config.get(name), int)]
    return MediaInfo(*tokens[:1] or [0]) if tokens or "vision_config" in config else None


def _feature(
    item: VllmItem, name: str, identifier: str, offset: int, values: msgspec.Raw | None
) -> dict[str, Any]:
    """vLLM's MultiModalFeatureSpec."""
    return {
        "data": values,
        "modality": item.modality,
        "identifier": identifier,
        "mm_position": {"offset": offset + item.offset, "length": item.length, "is_embed": item.embeds},
        "mm_hash": name,
    }


def _cache_gb(arguments: Sequence[str]) -> float:
    """--mm-processor-cache-gb, which vLLM has read before."""
    found = DEFAULT_CACHE_GB
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == "--mm-processor-cache-gb":
            try:
                found = float(value if equals else following)
            except ValueError:
                continue
    return found
