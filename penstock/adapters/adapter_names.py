"""What names LoRA adapters may have."""

from __future__ import annotations

from penstock.adapters.errors import AdapterError

MAX_NAME_CHARS = 256


def check_name(name: str) -> None:
    """Raises AdapterError for a name that no adapter may have. Metrics join names with commas, and a name is
    part of a path (``/v1/models/NAME``) and of log lines."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise AdapterError(f"a name of {len(name)} characters, 1 to {MAX_NAME_CHARS} are allowed")
    for character in name:
        if character == "," or not character.isprintable():
            raise AdapterError(f"{name!r} has the character {character!r}, which no name may have")
    if name != name.strip():
        raise AdapterError(f"{name!r} begins or ends with a space")
