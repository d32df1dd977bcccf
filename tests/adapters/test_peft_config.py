"""PEFT's adapter_config.json."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.errors import AdapterError
from penstock.adapters.layer_patterns import LayerPatterns
from penstock.adapters.peft_config import MUST_BE_OFF, PeftConfig, parse_peft_config

Q = "model.layers.0.self_attn.q_proj"


def parse(**fields: Any) -> PeftConfig:
    return parse_peft_config(json.dumps({"peft_type": "LORA", **fields}).encode())


AS_PEFT_WRITES_IT = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "org/base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": True, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16, "lora_bias": False,
    "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core",
    "modules_to_save": None, "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


def test_a_file_as_peft_writes_it() -> None:
    config = parse(**AS_PEFT_WRITES_IT)
    assert config.scaling(Q, 8) == 2.0


def test_defaults_are_those_of_peft() -> None:
    config = parse()
    assert config.scaling(Q, 8) == 1.0


def test_every_layer_has_its_rank_and_its_scaling() -> None:
    config = parse(
        r=8,
        lora_alpha=16,
        rank_pattern={"q_proj": 4, "mlp.up_proj": 2, "up_proj": 3, "^model.layers.1.self_attn.v_proj": 5},
        alpha_pattern={"q_proj": 32.5, "v_proj$": 0},
    )
    assert config.scaling(Q, 4) == 32.5 / 4
    assert config.scaling("q_proj", 4) == 32.5 / 4
    assert config.scaling("model.layers.0.mlp.up_proj", 2) == 16 / 2
    assert config.scaling("model.layers.0.moe.up_proj", 3) == 16 / 3
    assert config.scaling("model.layers.1.self_attn.v_proj", 5) == 0
    assert config.scaling("model.model.layers.1.self_attn.v_proj", 8) == 0
    assert config.scaling("model.layers.0.xq_proj", 8) == 2


def test_the_first_pattern_that_matches_decides() -> None:
    patterns = {"up_proj": 3, "mlp.up_proj": 2, "^a.mlp.up_proj": 1}
    for items in (list(patterns.items()), list(patterns.items())[::-1]):
        config = parse(rank_pattern=dict(items))
        assert config.scaling("a.mlp.up_proj", items[0][1]) == 8 / items[0][1]


@pytest.mark.parametrize("dot", [".", r"\."])
def test_alternations_and_beginnings(dot: str) -> None:
    config = parse(
        rank_pattern={
            f"^model{dot}layers{dot}1{dot}q_proj|k_proj$": 4,
            ".*(q_proj|o_proj)$": 2,
            f"^.*{dot}up_proj": 3,
            f"^(layers{dot}1{dot}v_proj|layers{dot}2{dot}v_proj)": 5,
            "(a|b)": 6,
        },
    )
    for layer, rank in {
        "model.layers.1.q_proj": 4,
        "x.model.layers.1.q_proj": 2,
        "layers.1.k_proj": 4,
        "layers.1.xk_proj": 8,
        "layers.1.xq_proj": 2,
        "q_proj": 2,
        "o_proj": 2,
        "o_proj.x": 8,
        "mlp.up_proj": 3,
        "up_proj": 8,
        "layers.1.v_proj": 5,
        "layers.2.v_proj": 5,
        "model.layers.1.v_proj": 8,
        "model.a": 6,
        "b": 6,
        "a.b.c": 8,
    }.items():
        assert config.scaling(layer, rank) == 8 / rank, layer


@given(st.data())
def test_what_is_supported_matches_as_in_peft(data: st.DataObject) -> None:
    """It writes ``re.match(rf"(.*\\.)?({pattern})$", layer)``. Dots without a backslash, which match any
    character there, are left out."""
    name = st.text("ab", min_size=1, max_size=2) | st.sampled_from([r"a\.b", r"\.a", r"b\.a\.a"])
    begin = st.sampled_from(["", "^", ".*", "^.*", ".*\\.", "a\\.", "^b"])
    end = st.sampled_from(["", "$"])
    one = st.builds("{}{}{}".format, begin, name, end)
    group = st.builds("{}({}){}".format, begin, st.lists(name, min_size=1, max_size=3).map("|".join), end)
    pattern = st.lists(one, min_size=1, max_size=3).map("|".join) | group
    patterns = data.draw(st.lists(pattern, min_size=1, max_size=4, unique=True))
    layer = data.draw(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join))
    matching = [place for place, each in enumerate(patterns) if re.match(rf"(.*\.)?({each})$", layer)]
    found = LayerPatterns("field", {each: place for place, each in enumerate(patterns)})
    assert found.find(layer, -1) == min(matching, default=-1)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "",
            "(",
            "a)|(b",
            "(" * 300,
            "(?=a)",
            "(?:a|b)",
            "((a))",
            "(a)(b)",
            "(a|b)_proj",
            "a|",
            "()",
            "(a|)",
        ),
        *("a+", "a*", "a?", ".*", "a.*b", "[ab]", r"layers\.\d+\.q_proj", "a{2}", "a$b", "a^", "^^a", "a$$"),
        *("a\\", "\\", r"\\", "a b", "a\n", "é", "(.*a|b)c", ".*^a", ".*(^a)", "(a|b", ".*.*a", "a|(b|c)"),
    ],
)
def test_other_regular_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(AdapterError, match=r"^adapter_config\.json: rank_pattern: ") as refused:
        parse(rank_pattern={"q_proj": 1, pattern: 1})
    assert f"{pattern[:100]!r} is not supported: a pattern is the end of a layer's name" in str(refused.value)


def test_what_every_layer_is_compared_with_is_bounded() -> None:
    names = "|".join(f"x{number}" for number in range(257))
    parse(rank_pattern={f"({names})": 1})
    with pytest.raises(AdapterError, match=r"alpha_pattern: it has more than 256 names after \.\*"):
        parse(alpha_pattern={f".*({names})": 1})


@pytest.mark.timeout(60)
def test_hostile_patterns_end() -> None:
    patterns = {f".*{'a.' * 400}{number}": 1 for number in range(256)}
    patterns |= {f"{'a.' * 40}{number}|" * 20 + "b": 1 for number in range(300)}
    config = parse(rank_pattern=patterns)
    for number in range(10_000):
        config.scaling(f"{'a.' * 100}{number}x", 8)


def test_rank_stabilised_scaling() -> None:
    assert parse(use_rslora=True, r=4, lora_alpha=8).scaling(Q, 4) == 8 / math.sqrt(4)
    assert parse(use_rslora=None, r=4, lora_alpha=8).scaling(Q, 4) == 2


def test_weights_of_another_rank_than_the_configuration_s() -> None:
    with pytest.raises(AdapterError, match=r"q_proj: its rank is 8; adapter_config\.json says 4"):
        parse(rank_pattern={"q_proj": 4}).scaling(Q, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' is run"),
        ({"peft_type": None}, "peft_type"),
        ({"bias": "all"}, "bias is 'all'; only 'none' is run"),
        ({"r": 0}, r"`int` >= 1 - at `\$\.r`"),
        ({"r": 1 << 20}, r"at `\$\.r`"),
        ({"r": 8.5}, r"at `\$\.r`"),
        ({"lora_alpha": 1e30}, r"at `\$\.lora_alpha`"),
        ({"lora_alpha": "x"}, r"at `\$\.lora_alpha`"),
        ({"rank_pattern": {"q_proj": 0}}, r"at `\$\.rank_pattern"),
        ({"rank_pattern": [1]}, r"at `\$\.rank_pattern"),
        ({"rank_pattern": {str(number): 1 for number in range((1 << 15) + 1)}}, "length <= 32768"),
        ({"alpha_pattern": {"q_proj": "1"}}, r"at `\$\.alpha_pattern"),
        ({"use_dora": True}, "use_dora is not supported; it is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is not supported; it is \['lm_head'\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"trainable_token_indices": list(range(1000))}, "trainable_token_indices .* 12, 13, .*…"),
        *(
            ({"init_lora_weights": method}, f"init_lora_weights is '{method}', which changes the base")
            for method in ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga")
        ),
    ],
)
def test_what_is_not_run_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=f"^adapter_config.json: .*{message}"):
        parse(**fields)


@pytest.mark.parametrize("name", MUST_BE_OFF)
def test_fields_that_must_be_off(name: str) -> None:
    for off in (None, False, [], {}):
        assert parse(**{name: off}).scaling(Q, 8) == 1
    with pytest.raises(AdapterError, match=f"{name} is not supported"):
        parse(**{name: {"a": 1}})


@pytest.mark.parametrize("method", [True, False, "gaussian", "eva", "orthogonal", "mica", None])
def test_beginnings_that_leave_the_base_model_as_it_is(method: Any) -> None:
    assert parse(init_lora_weights=method).scaling(Q, 8) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"peft_type": "\xff"}',
        b"[" * 100_000,
        b'{"peft_type": "LORA", "use_dora": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"peft_type": "LORA", "use_dora": ' + b"9" * 100_000 + b"}",
        b'{"peft_type": "LORA", "lora_alpha": NaN}',
        b'{"peft_type": "LORA", "lora_alpha": 1e999}',
        b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_configuration(text: bytes) -> None:
    with pytest.raises(AdapterError, match=r"^adapter_config\.json: "):
        parse_peft_config(text)
