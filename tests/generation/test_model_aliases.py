"""Other names of models."""

from __future__ import annotations

import pytest

from penstock.generation.model_aliases import MAX_NAME, ModelAliases, check_aliases


def test_exact_names_and_patterns() -> None:
    aliases = ModelAliases(["claude-opus=big", "claude-*=small", "gpt-?=small", "*=rest"])
    assert aliases.exact == {"claude-opus": "big"}
    assert aliases.model_of("claude-opus") == "big"
    assert aliases.model_of("claude-haiku-4-5") == "small"
    assert aliases.model_of("gpt-5") == "small"
    assert aliases.model_of("gpt-55") == "rest"
    assert aliases.model_of("x" * (MAX_NAME + 1)) is None
    assert ModelAliases(["Claude=m"]).model_of("claude") is None


def test_an_alias_needs_a_served_model_and_a_name_of_its_own() -> None:
    check_aliases(["a=m", "b*=n"], ["m", "n"])
    with pytest.raises(ValueError, match="--model-alias a=x: x is not served; served are m, n"):
        check_aliases(["a=x"], ["m", "n"])
    with pytest.raises(ValueError, match="--model-alias n=m: n is the name of a served model"):
        check_aliases(["n=m"], ["m", "n"])
