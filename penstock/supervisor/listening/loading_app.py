"""The HTTP application while the model loads: checks access as API servers do, and answers probes alone."""

from __future__ import annotations

import dataclasses
import secrets
import time

from penstock.api.routes.page import Page
from penstock.config.serve import ServeConfig
from penstock.dialects.gemini.errors import error_body as gemini_error
from penstock.dialects.messages import errors as messages_errors
from penstock.http.access_keys import OPEN_PATHS, Keys
from penstock.http.admission import LOADING_RETRY_MS, send_readiness, unavailable
from penstock.http.cors import Cors
from penstock.http.errors import ApiError, encode_json
from penstock.http.request import HttpRequest
from penstock.supervisor.startup.startup_status import SERVING, StartupStatus

_METHODS = {
    "/health": ("GET", "HEAD"),
    "/ready": ("GET", "HEAD"),
    "/ping": ("GET", "HEAD", "POST"),
}


class LoadingApp:
    """Answers as an API server would, as far as that is possible without one."""

    def __init__(self, config: ServeConfig, status: StartupStatus) -> None:
        self._status = status
        self._root = config.root_path
        self._keys = Keys(config.api_key or (), config.admin_api_key or ())
        self._cors = Cors(config)
        self._page = Page(config.root_path) if config.web_page else None

    async def __call__(self, http: HttpRequest) -> None:
        http.reply_headers = self._cors.reply_headers(http)
        try:
            await self._answer(http)
        except ApiError as error:
            body = None
            if http.path.startswith("/api/"):
                body = encode_json({"error": error.message})
            elif http.path.startswith("/v1beta/"):
                body = gemini_error(error)
            elif messages_errors.is_anthropic(http.path, http.fields):
                request_id = secrets.token_hex(8)
                error.headers = [*error.headers, (b"request-id", request_id.encode())]
                body = messages_errors.error_body(error, request_id)
            await http.reply_error(error, body)

    async def _answer(self, http: HttpRequest) -> None:
        if self._root and http.path.startswith(f"{self._root}/"):
            http.path = http.path[len(self._root) :]
        path, method = http.path, http.method
        if (preflight := self._cors.preflight(http)) is not None:
            http.reply_headers = preflight
            await http.reply(204, ())
            return
        if self._page is not None and path in self._page.paths and method in ("GET", "HEAD"):
            await self._page.answer(http)  # it shows what /ready says
            return
        self._keys.check(path, http.fields)
        if path not in OPEN_PATHS:
            raise self._loading()
        allowed = _METHODS[path]
        if method not in allowed:
            headers = [(b"allow", ", ".join(allowed).encode())]
            raise ApiError(405, f"{path} takes {' or '.join(allowed)}, not {method}.", headers=headers)
        if path != "/health":
            elapsed = round(time.monotonic() - self._status.started_at, 1)
            state = dataclasses.asdict(self._status.report) | {"elapsed_s": elapsed}
            await send_readiness(http, state, self._loading())
        else:
            await http.reply_json(b"{}")

    def _loading(self) -> ApiError:
        report = self._status.report
        if report.phase == SERVING:
            text = "The server is ready, on new connections: this one was opened while the model loaded."
            return unavailable(text, "loading")
        share = "" if report.progress is None else f" ({report.progress:.0%})"
        text = f"The server is loading the model: {report.phase}{share}."
        return unavailable(text, "loading", LOADING_RETRY_MS)
