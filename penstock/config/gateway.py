"""Options of ``penstock gateway``."""

from __future__ import annotations

from penstock.config.gateway_options.process import ProcessOptions


class GatewayConfig(ProcessOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``penstock gateway``, by group in :mod:`penstock.config.gateway_options`."""
