"""The command line. From its import on, a signal ends the program without a traceback."""

from __future__ import annotations

from penstock.cli import early_signals

early_signals.install()
