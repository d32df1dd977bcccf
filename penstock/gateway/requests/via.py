"""The header ``Via`` (RFC 9110 §7.6.3): by which a gateway knows requests that it has relayed before.

Where endpoints of a gateway lead back to it, a request would go round until its headers are too many. A
gateway has to name itself in requests, and need not in replies, which are relayed as they came.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from hashlib import blake2b

from penstock.gateway.requests.apis import gateway_error
from penstock.gateway.upstream.exchange import Headers

VIA = b"via"
MAX_HOPS = 16
"""Proxies before this one. A chain has two or three; replicas behind one address that lead to that address
each have a name of their own."""
MAX_SHOWN = 1000
"""Characters of their names."""
_without_comments = re.compile(r"\([^()]*\)").sub


def gateway_id(run_dir: str) -> str:
    """What tells a gateway from all others; its workers have the same ``run_dir``."""
    return blake2b(f"{socket.gethostname()}:{run_dir}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Via:
    """The name of this gateway in the header."""

    name: str

    def refuse_loops(self, headers: Headers) -> None:
        """Refuse a request that this gateway, or too many others, have relayed. Raises ApiError."""
        given = ",".join(value.decode("latin-1") for name, value in headers if name == VIA)
        if not given:
            return
        hops = [hop.split() for hop in _without_comments("", given).split(",")]
        names = [hop[1] for hop in hops if len(hop) > 1]
        if self.name in names:
            way = " → ".join(names[names.index(self.name) :])
            what = f"The request came back to {self.name}, by {way[:MAX_SHOWN]}: an endpoint leads here"
        elif len(names) > MAX_HOPS:
            way = " → ".join(names[-MAX_HOPS:])
            what = (
                f"{len(names)} proxies have relayed the request, of which {MAX_HOPS} may: {way[:MAX_SHOWN]}"
            )
        else:
            return
        raise gateway_error(508, "loop_detected", f"{what}.")

    def entry(self, http_version: str) -> tuple[bytes, bytes]:
        """The header that this gateway adds to a request that came by this version of HTTP."""
        return VIA, f"{http_version} {self.name}".encode()
