"""The banner that the operator sees when everything is ready."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence

from penstock import __version__
from penstock.config.serve import ServeConfig
from penstock.http.sockets.listener import Address
from penstock.supervisor.children.actions import ProcessName
from penstock.wire.control import Info


def banner(facts: Mapping[str, str]) -> str:
    """The lines of the banner, without a final newline."""
    return "\n".join([f"penstock {__version__}", *(f"  {key:<10} {value}" for key, value in facts.items())])


def banner_facts(
    config: ServeConfig,
    *,
    address: Address | None,
    served_model_names: Sequence[str],
    model_dir: str,
    supervisor_pid: int,
    pids: Mapping[ProcessName, int],
    infos: Mapping[ProcessName, Info],
) -> dict[str, str]:
    """What the operator wants to know, by name.

    ``address`` is the listening address, None on a host without API servers; ``infos`` holds each child's
    description of itself, for API servers on other hosts their URL.
    """
    names = ", ".join(served_model_names)
    source = model_dir if model_dir not in names else ""
    lines = {
        "model": f"{names} ({source})" if source else names,
        "engine": _engine(config, infos),
        "processes": _processes(supervisor_pid, pids),
    }
    if config.speculative_method != "none":
        model = "" if config.draft_model is None else f" {config.draft_model}"
        lines["drafts"] = f"{config.speculative_method}{model}, tokens {config.speculative_tokens}"
    ranks = config.ranks
    if len(ranks) < config.data_parallel_size:
        lines["engines"] = f"{len(ranks)} of {config.data_parallel_size}, {_ranks(ranks)}"
    if config.attach is not None:
        there = sum(name.role == "engine" and bool(info) for name, info in infos.items())
        lines["attached"] = f"{there} of {len(ranks)} engines; they connect to {config.attach}"
    if config.coordinator is not None:
        lines["fleet"] = config.coordinator
    urls = {str(info["URL"]): "" for info in infos.values() if "URL" in info}
    if address is not None:
        urls = {base_url(address, tls=config.ssl_certfile is not None): _reach(address)} | urls
    if urls:
        first = next(iter(urls))
        lines |= {
            "URL": ", ".join(f"{url}/v1{reach}" for url, reach in urls.items()),
            "metrics": f"{first}/metrics",
            **({"page": f"{first}/"} if config.web_page else {}),
            "API key": _access(config),
        }
    return lines


def base_url(address: Address, *, tls: bool = False) -> str:
    """A URL by which the same machine reaches a server that listens on ``address``."""
    scheme = "https" if tls else "http"
    if isinstance(address, str):
        return f"{scheme}://localhost"  # clients send it in the Host header; they connect to the socket
    ip = ipaddress.ip_address(address[0])
    if ip.is_unspecified:
        ip = ipaddress.ip_address("127.0.0.1" if ip.version == 4 else "::1")
    return f"{scheme}://[{ip}]:{address[1]}" if ip.version == 6 else f"{scheme}://{ip}:{address[1]}"


def _access(config: ServeConfig) -> str:
    keys = config.api_key or ()
    if not keys:
        return "off, anybody who can connect may use the server"
    if len(keys) > 1 and not config.admin_api_key:
        return f"required, and each of the {len(keys)} administers the server (--admin-api-key-file: who may)"
    return "required"


def _reach(address: Address) -> str:
    if isinstance(address, str):
        return f" (over the unix socket {os.path.abspath(address)})"
    return " (on every address of this machine)" if ipaddress.ip_address(address[0]).is_unspecified else ""


def _engine(config: ServeConfig, infos: Mapping[ProcessName, Info]) -> str:
    """The kind of engine and the engines' descriptions, equal ones once."""
    ranks_by_text: dict[str, list[int]] = {}
    for name, info in infos.items():
        if name.role == "engine" and info:
            text = ", ".join(f"{key} {_text(value)}" for key, value in info.items())
            ranks_by_text.setdefault(text, []).append(name.index)
    if len(ranks_by_text) == 1:
        return f"{config.engine}: {next(iter(ranks_by_text))}"
    each = "; ".join(f"engine {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_text.items())
    return f"{config.engine}; {each}" if each else config.engine


def _ranks(ranks: range) -> str:
    return f"ranks {ranks.start} to {ranks.stop - 1}" if ranks else "those of other hosts"


def _text(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _processes(supervisor_pid: int, pids: Mapping[ProcessName, int]) -> str:
    """``supervisor 10, 2 api-servers 11 12, 1 engine 13``."""
    parts = [f"supervisor {supervisor_pid}"]
    for role in ("api-server", "engine", "media-worker", "coordinator"):
        own = [str(pid) for name, pid in pids.items() if name.role == role]
        if not own:
            continue
        parts.append(f"{len(own)} {role}{'s' if len(own) != 1 else ''} {' '.join(own)}")
    return ", ".join(parts)
