"""Options: one definition each, read from command line, environment, YAML file and defaults."""

from __future__ import annotations

from penstock.config.describe import option
from penstock.config.errors import ConfigError
from penstock.config.introspect import Option, options_of, without_secrets
from penstock.config.options import ServeConfig
from penstock.config.origins import Origin, Origins
from penstock.config.sources import resolve

__all__ = [
    "ConfigError",
    "Option",
    "Origin",
    "Origins",
    "ServeConfig",
    "option",
    "options_of",
    "resolve",
    "without_secrets",
]
