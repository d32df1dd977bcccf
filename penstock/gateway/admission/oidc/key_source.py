"""Follows the keys of one issuer: fetches them by HTTPS, or reads them from a file."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from penstock.config.watched_file import read_regular, reason
from penstock.gateway.admission.oidc.issuer_entry import IssuerEntry, check_url
from penstock.gateway.admission.oidc.signing_keys import SigningKeys
from penstock.logging_setup import RateLimitedLog

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
_log_failure = RateLimitedLog(log)

FETCH_S = 10.0
"""Most seconds of a fetch, with discovery."""
MAX_BYTES = 1 << 20
"""Of a set of keys, and of what discovery tells."""
REFRESH_S = 300.0
"""Interval of fetches, less up to a tenth, so that not all workers fetch at once."""
MIN_INTERVAL_S = 5.0
"""Least time between fetches, whatever keys clients name."""
RETRY_S = 60.0
"""Most seconds until a fetch that has failed is repeated; the first one after MIN_INTERVAL_S."""
MAX_AGE_S = 86_400.0
"""Age at which keys are no longer used if they cannot be fetched again: those of an issuer that is down stay
in force for a day."""
FILE_S = 1.0
"""Interval of looks at a file."""
DISCOVERY = "/.well-known/openid-configuration"


class KeyFetchError(Exception):
    """The keys of an issuer cannot be had."""


class _Metadata(msgspec.Struct):
    """What discovery tells (OpenID Connect Discovery 1.0 §3)."""

    issuer: str
    jwks_uri: str


class KeySource:
    """The keys of an issuer. They are fetched in regular intervals, and when a token names another one."""

    def __init__(self, entry: IssuerEntry, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self.entry = entry
        self._clock = clock
        self._keys: SigningKeys | None = None
        self._text = b""
        self._read_at = 0.0
        self._began_at = -MIN_INTERVAL_S
        self._is_fetching = False
        self._wanted = asyncio.Event()

    @property
    def identity(self) -> tuple[str, str | None, str | None]:
        """What decides on the keys: sources with the same one have the same keys."""
        return self.entry.issuer, self.entry.jwks, self.entry.ca_file

    def current(self) -> SigningKeys | None:
        """The keys; None: there are none, or they are too old."""
        if self._keys is None or self._clock() - self._read_at > MAX_AGE_S:
            return None
        return self._keys

    @property
    def valid_until(self) -> float:
        """When the keys are too old, on the clock."""
        return self._read_at + MAX_AGE_S

    def want(self) -> bool:
        """A token has a key that is not known: ask the issuer. False: it has just been asked."""
        if self._is_fetching:
            return True
        if self.entry.has_file or self._clock() - self._began_at < MIN_INTERVAL_S:
            return False
        self._wanted.set()
        return True

    async def follow(self, on_read: Callable[[bool], None]) -> None:
        """Keep the keys up to date until it is cancelled. ``on_read`` is called after each attempt, and told
        whether the keys have changed."""
        failures = 0
        while True:
            self._wanted.clear()
            changed = False
            try:
                changed = await self.read()
                failures = 0
            except KeyFetchError as error:
                failures += 1
                self._log(error)
            except Exception:
                failures += 1
                log.exception("issuer %s: its keys cannot be read", self.entry.issuer)
            on_read(changed)
            wait_s = FILE_S if self.entry.has_file else REFRESH_S * random.uniform(0.9, 1.0)
            if failures and not self.entry.has_file:
                wait_s = min(MIN_INTERVAL_S * 2 ** (failures - 1), RETRY_S)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def read(self) -> bool:
        """Read the keys once. Returns whether they have changed. Raises KeyFetchError."""
        self._began_at, self._is_fetching = self._clock(), True
        try:
            text = await self._fetch_or_read()
            keys = self._keys if text == self._text and self._keys is not None else SigningKeys(text)
        except (OSError, ValueError) as error:
            raise KeyFetchError(f"jwks {self.entry.jwks or 'of discovery'}: {reason(error)}") from None
        finally:
            self._is_fetching = False
        self._read_at = self._clock()
        if keys is self._keys:
            return False
        self._keys, self._text = keys, text
        log.info("issuer %s: %d keys are in effect", self.entry.issuer, keys.count)
        return True

    def _log(self, error: KeyFetchError) -> None:
        if self.current() is None:
            state = "its tokens are refused"
        else:
            state = f"the keys that are known stay in effect for up to {MAX_AGE_S / 3600:g} hours"
        _log_failure(self.entry.issuer, "issuer %s: %s; %s", self.entry.issuer, error, state)

    async def _fetch_or_read(self) -> bytes:
        entry = self.entry
        if entry.has_file:
            text = await asyncio.get_running_loop().run_in_executor(None, read_regular, str(entry.jwks))
            return text.encode()
        import httpx  # takes tens of milliseconds, needed only with issuers

        try:
            async with (
                asyncio.timeout(FETCH_S),
                httpx.AsyncClient(verify=await self._context(), timeout=FETCH_S) as client,
            ):
                return await _get(client, entry.jwks or await _discover(client, entry.issuer))
        except TimeoutError:
            raise KeyFetchError(f"no answer within {FETCH_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise KeyFetchError(f"{entry.jwks or entry.issuer}: {error or type(error).__name__}") from None

    async def _context(self) -> ssl.SSLContext:
        """Made anew for each fetch, as authorities are replaced; in a thread, as it reads files."""
        made = asyncio.get_running_loop().run_in_executor(None, make_context, self.entry.ca_file)
        try:
            return await made
        except (OSError, ValueError) as error:
            raise KeyFetchError(reason(error)) from None


def check_files(entry: IssuerEntry) -> None:
    """Raise ValueError if a file of the issuer cannot be used."""
    if not entry.has_file:
        make_context(entry.ca_file)
        return
    try:
        SigningKeys(read_regular(str(entry.jwks)).encode())
    except (OSError, ValueError) as error:
        raise ValueError(f"jwks {entry.jwks}: {reason(error)}") from None


def make_context(ca_file: str | None) -> ssl.SSLContext:
    """What verifies the server of an issuer. Raises ValueError."""
    try:
        context = ssl.create_default_context(cadata=None if ca_file is None else read_regular(ca_file))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ValueError(f"ca-file {ca_file}: {reason(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


async def _discover(client: httpx.AsyncClient, issuer: str) -> str:
    """The URL of the issuer's keys. Raises KeyFetchError."""
    url = issuer.rstrip("/") + DISCOVERY
    text = await _get(client, url)
    try:
        told = msgspec.json.decode(text, type=_Metadata)
        check_url(told.jwks_uri)
    except (ValueError, RecursionError) as error:
        raise KeyFetchError(f"{url}: jwks_uri: {error}") from None
    if told.issuer != issuer:
        raise KeyFetchError(f"{url}: tells of another issuer than the one that was asked for")
    return told.jwks_uri


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    """Redirects are not followed. Raises KeyFetchError and httpx.HTTPError."""
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with client.stream("GET", url, headers=headers) as reply:
        if reply.status_code != 200:
            raise KeyFetchError(f"{url}: status {reply.status_code}")
        text = bytearray()
        async for piece in reply.aiter_raw():  # what is compressed has no bound
            text += piece
            if len(text) > MAX_BYTES:
                raise KeyFetchError(f"{url}: longer than {MAX_BYTES} bytes")
    return bytes(text)
