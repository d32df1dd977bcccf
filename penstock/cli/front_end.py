"""``penstock status --pid``: the share of a core that the front end of a running server takes, Penstock's or
another's. Its processes are those below the given one, told by their titles."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli.status_reading import Samples, read_samples

if TYPE_CHECKING:  # httpx is not imported at startup
    from penstock.client import Client

_API_SERVERS = re.compile(r"api.?server|gateway \d|vllm-rs", re.IGNORECASE)
"""Titles of processes that are the front end in the place of the first one."""
_TOKENIZERS = re.compile(r"tokenizer", re.IGNORECASE)
_ENGINES = re.compile(
    r"engine|worker|scheduler|coordinator|controller|_tracker|spawn_main|ray::", re.IGNORECASE
)
"""Titles of all others, also of vLLM's and SGLang's."""
_MAX_TITLE = 60
LIMITS, HALF = 0.8, 0.5
"""Shares of a core of the busiest thread: a loop that takes 0.8 has requests wait for it."""
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")


class Member(NamedTuple):
    """One process of the server."""

    pid: int
    title: str
    front_end: bool


def family(pid: int) -> list[Member]:
    """The process and all below it. Raises BenchError."""
    import psutil

    from penstock.bench.process_usage import alive, title

    processes = alive(pid, lambda process: [process, *process.children(recursive=True)])
    members = []
    for process in processes:
        try:
            name = title(process)[:_MAX_TITLE]
        except psutil.Error:  # it has ended, or is of another user
            continue
        members.append(Member(process.pid, name, False))
    first, below = members[0], [each for each in members[1:] if not _ENGINES.search(each.title)]
    servers = {each.pid for each in below if _API_SERVERS.search(each.title)} or {first.pid}
    servers |= {each.pid for each in below if _TOKENIZERS.search(each.title)}
    return [each._replace(front_end=each.pid in servers) for each in members]


def watch(pid: int, client: Client, seconds: float) -> dict[str, Any]:
    """What the processes take for ``seconds``. Those that end meanwhile are left out, unless they are of the
    front end: raises BenchError."""
    from penstock.bench.errors import BenchError
    from penstock.bench.process_usage import cpu_time

    members = family(pid)

    def read() -> tuple[float, dict[int, float], dict[int, dict[str, int]], Samples]:
        used = {}
        for each in members:
            try:
                used[each.pid] = cpu_time([each.pid]).total
            except BenchError:
                if each.front_end:
                    raise
        return time.monotonic(), used, {pid: _threads(pid) for pid in used}, _samples(client)

    before = read()
    time.sleep(seconds)
    after = read()
    wall = after[0] - before[0]
    rows = []
    for each in members:
        if (pid := each.pid) not in before[1] or pid not in after[1]:
            continue
        threads = [ns - before[2][pid].get(tid, 0) for tid, ns in after[2][pid].items()]
        share = (after[1][pid] - before[1][pid]) / wall
        busiest = max(threads) / 1e9 / wall if threads else share
        rows.append({**each._asdict(), "share": round(share, 3), "busiest_thread": round(busiest, 3)})
    samples = after[3]
    tokens = _total(samples, _TOKENS) - _total(before[3], _TOKENS)
    cpu_s = wall * sum(row["share"] for row in rows if row["front_end"])
    return {
        "seconds": round(wall, 2),
        "processes": rows,
        "busiest": max(row["busiest_thread"] for row in rows if row["front_end"]),
        "running": int(_total(samples, _RUNNING)) if samples else None,
        "waiting": int(_total(samples, _WAITING)) if samples else None,
        "tokens_per_s": round(tokens / wall) if samples else None,
        "us_per_token": round(1e6 * cpu_s / tokens, 1) if tokens > 0 else None,
    }


def text(found: dict[str, Any]) -> str:
    """The report as a table and a sentence."""
    from penstock.bench.tables import format_table

    rows = [("process", "pid", "of a core", "busiest thread", "")]
    for each in found["processes"]:
        counts = "front end" if each["front_end"] else ""
        shares = (f"{each['share']:.0%}", f"{each['busiest_thread']:.0%}")
        rows.append((each["title"], str(each["pid"]), *shares, counts))
    lines = format_table(rows)
    if found["running"] is not None:
        lines += ["", f"streams  {found['running']:,} running, {found['waiting']:,} waiting"]
        cost = "" if found["us_per_token"] is None else f", {found['us_per_token']} µs of the front end each"
        lines += [f"tokens   {found['tokens_per_s']:,} per second{cost}"]
    busiest = found["busiest"]
    says = "it does not limit this server at this load"
    if busiest >= HALF:
        says = "it limits this server" if busiest >= LIMITS else "it will before the load has doubled"
    return "\n".join(
        [*lines, "", f"The busiest thread of the front end takes {busiest:.0%} of a core: {says}."]
    )


def _threads(pid: int) -> dict[str, int]:
    """Nanoseconds that each thread has run; empty where the system does not tell."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found[path.parent.name] = int(path.read_text().split()[0])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return found


def _samples(client: Client) -> Samples:
    """Those of ``/metrics``; none if it does not answer."""
    from penstock.client import ClientError

    try:
        return read_samples(client.get("/metrics").decode(errors="replace"))
    except ClientError:
        return {}


def _total(samples: Samples, names: tuple[str, ...]) -> float:
    return sum(value for name in names for _, value in samples.get(name, ()))
