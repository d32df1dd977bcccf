"""How the servers of one pool are reached, and as whom: the connection record of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.gateway.upstream.request_form import AS_GIVEN, RequestForm
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.tls import UpstreamTls

Http2Policy = Literal["auto", "off", "require"]


@dataclass(slots=True, eq=False)
class Upstream:
    """Compared by identity: servers whose record is another one get connections of their own."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    http2: Http2Policy = "auto"
    tls: UpstreamTls = field(default_factory=UpstreamTls)
    max_attempts: int = 3
    """Endpoints at which a request may fail, of each model or pool that takes the place of another."""
    hosted: bool = False
    """The API is somebody else's: it has no metrics, and is told nothing but requests of clients."""
    form: RequestForm = AS_GIVEN
    """What requests get. Connections read it for each."""
    key_source: str = ""
    """What gives the gateway's own key for these servers, in words; empty: it has none for them."""
    make_form: Callable[[], RequestForm] | None = None
    """Gives the form, another one once the key's file has changed; None: it stays."""

    def with_form(self, make: Callable[[], RequestForm]) -> Upstream:
        """Copy the record with another form."""
        return replace(self, form=make(), make_form=make)

    def refresh(self) -> None:
        """Look at the file of the key; the new one goes out with the next request."""
        if self.make_form is not None:
            self.form = self.make_form()
