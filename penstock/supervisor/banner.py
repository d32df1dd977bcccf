"""What the operator reads once everything is ready."""

import ipaddress
from collections.abc import Mapping, Sequence

from penstock import __version__
from penstock.config.options import ServeConfig
from penstock.supervisor.fleet import Name
from penstock.wire.control import Info


def banner(
    config: ServeConfig,
    *,
    address: tuple[str, int],
    served_model_names: Sequence[str],
    model_dir: str,
    supervisor_pid: int,
    pids: Mapping[Name, int],
    infos: Mapping[Name, Info],
) -> str:
    """The block of lines, without a newline at its end.

    ``address`` is what the server listens on; ``infos`` holds what each child said of itself.
    """
    url = base_url(*address)
    names = ", ".join(served_model_names)
    source = model_dir if model_dir not in names else ""
    lines = {
        "model": f"{names} ({source})" if source else names,
        "engine": _engine(config, infos),
        "processes": _processes(supervisor_pid, pids),
        "URL": f"{url}/v1{_reach(address)}",
        "metrics": f"{url}/metrics",
        "docs": f"{url}/docs",
        "API key": "required" if config.api_key else "off, anybody who can connect may use the server",
    }
    return "\n".join([f"penstock {__version__}", *(f"  {key:<10} {value}" for key, value in lines.items())])


def base_url(host: str, port: int) -> str:
    """A URL to reach a server that listens on the IP address ``host``, from the same machine."""
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified:
        ip = ipaddress.ip_address("127.0.0.1" if ip.version == 4 else "::1")
    return f"http://[{ip}]:{port}" if ip.version == 6 else f"http://{ip}:{port}"


def _reach(address: tuple[str, int]) -> str:
    return " (on every address of this machine)" if ipaddress.ip_address(address[0]).is_unspecified else ""


def _engine(config: ServeConfig, infos: Mapping[Name, Info]) -> str:
    """The kind, and what the engines say of themselves, once for those that say the same."""
    said: dict[str, list[int]] = {}
    for name, info in infos.items():
        if name.role == "engine" and info:
            text = ", ".join(f"{key} {_text(value)}" for key, value in info.items())
            said.setdefault(text, []).append(name.index)
    if len(said) == 1:
        return f"{config.engine}: {next(iter(said))}"
    each = "; ".join(f"engine {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items())
    return f"{config.engine}; {each}" if each else config.engine


def _text(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _processes(supervisor_pid: int, pids: Mapping[Name, int]) -> str:
    """``supervisor 10, 2 api-servers 11 12, 1 engine 13``."""
    parts = [f"supervisor {supervisor_pid}"]
    for role in ("api-server", "engine"):
        own = [str(pid) for name, pid in pids.items() if name.role == role]
        parts.append(f"{len(own)} {role}{'s' if len(own) != 1 else ''} {' '.join(own)}")
    return ", ".join(parts)
