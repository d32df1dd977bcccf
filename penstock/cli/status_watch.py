"""``penstock status --watch``: the status again and again, until Ctrl-C.

On a terminal the tables are refreshed in place. Elsewhere each reading is one line. It waits for a server
that loads or goes away.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.cli.status_reading import GatewayReading, Reading, status_of
from penstock.cli.status_text import line, tables

LOADING = 503
"""Status of a server that is there and not ready yet."""


class Display(Protocol):
    """Where statuses are shown."""

    def show(self, status: dict[str, Any], note: str) -> None:
        """Show a status. ``note``: what happened since the last one."""

    def away(self, problem: str) -> None:
        """Shows that the server does not answer."""

    def close(self) -> None: ...


def watch(
    read: Callable[[], Reading | GatewayReading],
    display: Display,
    *,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show readings until KeyboardInterrupt; return the exit code.

    Raises ClientError if there is no first reading, except while the server loads: its URL or key is wrong.
    """
    from penstock.client import ClientError

    earlier: Reading | GatewayReading | None = None
    try:
        while True:
            try:
                later = read()
            except ClientError as error:
                if earlier is None and error.status != LOADING:
                    raise
                display.away(str(error))
            else:
                earlier = earlier or later
                display.show(status_of(earlier, later), _restart(earlier, later))
                earlier = later
            sleep(interval_s)
    except KeyboardInterrupt:
        return 0
    finally:
        display.close()


def _restart(earlier: Reading | GatewayReading, later: Reading | GatewayReading) -> str:
    if not isinstance(earlier, Reading) or not isinstance(later, Reading):
        return ""
    known = earlier.started is not None and later.started is not None
    return "the server has restarted" if known and earlier.started != later.started else ""


def make_display(*, as_json: bool) -> Display:
    """The display for standard output as it is."""
    if as_json:
        return _JsonLines()
    return _InPlace() if sys.stdout.isatty() else _Lines()


class _Lines:
    def show(self, status: dict[str, Any], note: str) -> None:
        if note:
            self._print(note)
        self._print(line(status))

    def away(self, problem: str) -> None:
        self._print(problem)

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, flush=True)


class _JsonLines:
    def show(self, status: dict[str, Any], note: str) -> None:
        print(json.dumps(status | ({"note": note} if note else {})), flush=True)

    def away(self, problem: str) -> None:
        print(json.dumps({"kind": "error", "message": problem}), flush=True)

    def close(self) -> None:
        pass


class _InPlace:
    """Tables that replace each other. While the server is away, the last ones stay above the problem."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False)
        self._live.start()
        self._last = ""
        self._note = ""

    def show(self, status: dict[str, Any], note: str) -> None:
        self._last = tables(status)
        if note:
            self._note = f"{time.strftime('%H:%M:%S')} {note}"
        self._update(self._note)

    def away(self, problem: str) -> None:
        self._update(f"{time.strftime('%H:%M:%S')} {problem}")

    def close(self) -> None:
        self._live.stop()

    def _update(self, below: str) -> None:
        from rich.text import Text

        self._live.update(Text(f"{self._last}\n\n{below}".rstrip(), no_wrap=True), refresh=True)
