"""What errors, logs and reports must not repeat: secrets, and credentials in URLs."""

from __future__ import annotations

import re

HIDDEN = "***"
"""What stands in the place of a secret."""

# Up to the last @, as passwords may contain unescaped ones, and slashes. Without a scheme only what has a
# colon is taken for user:password.
_USER = re.compile(r"(://)[^\s'\"]*@|(^|[\s'\"])[^\s:/'\"@]+:(?!//)[^\s'\"]*@")
_QUERY = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]*")


def hide_credentials(text: str) -> str:
    """``text`` without users and passwords of URLs, and without their queries, which may have tokens."""
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(rf"\g<1>\g<2>{HIDDEN}@", text))
