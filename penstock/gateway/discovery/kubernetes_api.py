"""Requests to the Kubernetes API server.

The official client finds the server and the credentials, renews them, and does TLS. Its models are not used:
to decode a page of pods into them would hold up the event loop, and the streams that the gateway relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import OpenApiException
from kubernetes.aio.config import (
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

from penstock import __version__
from penstock.config.errors import ConfigError
from penstock.config.hidden import hide_credentials

CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 90.0
"""A watch without a byte for this long is resumed, as its connection may be dead. The API server sends
bookmarks about once a minute."""
LIST_LIMITS = aiohttp.ClientTimeout(total=60.0, sock_connect=CONNECT_TIMEOUT_S)
WATCH_LIMITS = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S)
MAX_PAGE_BYTES = 64 << 20
MAX_EVENT_BYTES = 8 << 20
"""etcd stores at most 1.5 MB per object."""
MAX_ERROR_BYTES = 64 << 10
MAX_RETRY_AFTER_S = 300.0
SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ApiServerError(Exception):
    """The API server refused a request, or could not be reached."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """0: there was no reply."""
        self.retry_after_s = retry_after_s


class SilenceError(ApiServerError):
    """Nothing has come for too long."""


class _Status(msgspec.Struct):
    """An error of the API server."""

    message: str = ""


class KubernetesApi:
    """The API server, as the credentials allow to see it."""

    def __init__(self, kubeconfig: str | None) -> None:
        """``kubeconfig``: a file; None: the service account of the pod, or outside of a cluster
        ``$KUBECONFIG`` or ``~/.kube/config``."""
        self._kubeconfig = kubeconfig
        self._client: ApiClient | None = None
        self._users: Counter[ApiClient] = Counter()
        """Requests that clients have, also clients of earlier credentials."""
        self._connecting = asyncio.Lock()
        self.namespace = "default"
        """Namespace of the service account, or of the context of the file."""

    async def connect(self) -> None:
        """Find the API server and the credentials. Raises ConfigError."""
        configuration = Configuration()
        try:
            if self._kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                load_incluster_config(client_configuration=configuration)
                namespace = _read_namespace()
            else:
                _check_exists(self._kubeconfig)
                loader = await load_kube_config(
                    self._kubeconfig, client_configuration=configuration, persist_config=False
                )
                namespace = loader.current_context["context"].get("namespace")
            client = ApiClient(configuration)
        except (ConfigException, OSError, ValueError, yaml.YAMLError) as error:
            where = "" if self._kubeconfig is None else f" --kubernetes-config {self._kubeconfig}:"
            raise ConfigError(f"--kubernetes-pool:{where} {error}") from None
        client.user_agent = f"penstock-gateway/{__version__}"
        self._client, self.namespace = client, namespace or "default"

    async def close(self) -> None:
        """No more requests will come."""
        self._retire()
        await self._close_unused()

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a reply. Raises ApiServerError."""
        async with self._reply(path, query, LIST_LIMITS) as response:
            return await _read(response, MAX_PAGE_BYTES)

    async def stream(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The lines of a reply, one object each, until the API server ends it. Raises ApiServerError, and
        SilenceError."""
        async with self._reply(path, query, WATCH_LIMITS) as response:
            line = bytearray()
            while data := await _next(response):
                *ends, rest = data.split(b"\n")
                for end in ends:
                    line += end
                    if line:
                        yield bytes(line)
                    line.clear()
                line += rest
                if len(line) > MAX_EVENT_BYTES:
                    raise ApiServerError(f"an event has more than {MAX_EVENT_BYTES} bytes")

    @contextlib.asynccontextmanager
    async def _reply(
        self, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to a GET request, whose status is 200. Raises ApiServerError."""
        async with self._connecting:  # one of several watches finds new credentials
            if self._client is None:
                try:
                    await self.connect()
                except ConfigError as error:
                    raise ApiServerError(str(error)) from None
            client = self._client
        assert client is not None
        self._users[client] += 1
        try:
            response = await _send(client, path, query, limits)
            try:
                if response.status != 200:
                    raise await _refusal(response)
                yield response
            finally:
                response.close()
        except ApiServerError as error:
            if error.status == 401 and client is self._client:
                self._retire()  # the credentials may have expired: the next request reads them again
            raise
        finally:
            self._users[client] -= 1
            await self._close_unused()

    def _retire(self) -> None:
        """Send no more requests by the client that there is; those that it has go on."""
        if self._client is not None:
            self._users.setdefault(self._client, 0)
        self._client = None

    async def _close_unused(self) -> None:
        for client in [each for each, users in self._users.items() if each is not self._client and not users]:
            del self._users[client]
            await client.close()


async def _send(
    client: ApiClient, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
) -> aiohttp.ClientResponse:
    """The head of the reply. Raises ApiServerError."""
    try:
        method, url, headers, _, _ = await client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        reply = await client.call_api(method, url, headers, _request_timeout=limits)
    except (aiohttp.ClientError, TimeoutError, OSError, OpenApiException, ConfigException) as error:
        raise _unreachable(error) from None
    response: aiohttp.ClientResponse = reply.response
    return response


async def _next(response: aiohttp.ClientResponse) -> bytes:
    """The next piece of the body; empty: there is none. Raises ApiServerError."""
    try:
        data: bytes = await response.content.readany()
    except TimeoutError:
        raise SilenceError("no news") from None
    except (aiohttp.ClientError, OSError) as error:
        raise _unreachable(error) from None
    return data


def _check_exists(kubeconfig: str | None) -> None:
    """Raises OSError, ConfigException: the client takes a missing file for an empty one."""
    if kubeconfig is not None:
        Path(kubeconfig).stat()
        return
    files = os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)
    if not any(Path(file).expanduser().exists() for file in files):
        raise ConfigException(f"this is no pod of a cluster, and there is no {os.pathsep.join(files)}")


def _read_namespace() -> str:
    """Read the namespace of the pod that the gateway runs in."""
    return SERVICE_ACCOUNT_NAMESPACE.read_text().strip()


async def _refusal(response: aiohttp.ClientResponse) -> ApiServerError:
    body = await _read(response, MAX_ERROR_BYTES)
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    after = response.headers.get("retry-after", "")
    waits = after.isascii() and after.isdigit()
    return ApiServerError(
        f"status {response.status}: {message or response.reason}",
        response.status,
        min(float(after), MAX_RETRY_AFTER_S) if waits else None,
    )


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body. Raises ApiServerError."""
    body = bytearray()
    while data := await _next(response):
        body += data
        if len(body) > limit:
            raise ApiServerError(f"a reply has more than {limit} bytes", response.status)
    return bytes(body)


def _unreachable(error: Exception) -> ApiServerError:
    text = hide_credentials(str(error))
    return ApiServerError(text or ("time-out" if isinstance(error, TimeoutError) else repr(error)))
