"""The files of sentence-transformers that say what follows a transformer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.pooling.modules import (
    DenseStep,
    LayerNormStep,
    LogitScore,
    Modules,
    NormalizeStep,
    PoolStep,
    read_modules,
)


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def listed(*modules: str, package: str = "sentence_transformers.models") -> list[dict[str, Any]]:
    """``modules``: folder and class."""
    pairs = (module.split(":") for module in modules)
    return [
        {"idx": at, "name": str(at), "path": path, "type": f"{package}.{kind}"}
        for at, (path, kind) in enumerate(pairs)
    ]


def test_without_files_tokens_are_averaged(tmp_path: Path) -> None:
    assert read_modules(tmp_path) == Modules(stated=False, transformer=tmp_path)
    write(tmp_path, {"config.json": {"function_to_apply": "sigmoid"}})
    found = read_modules(tmp_path)
    assert (found.label_activation, found.width(32), found.normalizes) == ("Sigmoid", 32, False)
    assert found.pools_prompt
    write(tmp_path, {"config.json": {"problem_type": "multi_label_classification"}})
    assert read_modules(tmp_path).label_activation == "Sigmoid"


def test_an_embedder_of_the_first_releases(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "modules.json": listed("0_Transformer:Transformer", "1_Pooling:Pooling", "2_Normalize:Normalize"),
            "0_Transformer/sentence_roberta_config.json": {"max_seq_length": 128, "do_lower_case": True},
            "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True},
        },
    )
    assert read_modules(tmp_path) == Modules(
        stated=True,
        transformer=tmp_path / "0_Transformer",
        steps=(PoolStep(), NormalizeStep()),
        max_seq_length=128,
        do_lower_case=True,
    )


def test_every_module_of_a_present_release(tmp_path: Path) -> None:
    dense = {
        "in_features": 16,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": True,
    }
    on_tokens = {"in_features": 8, "out_features": 8, "module_input_name": "token_embeddings"}
    pooling = {"embedding_dimension": 8, "pooling_mode": ["lasttoken", "cls"], "include_prompt": False}
    modules = listed(
        ":base.modules.transformer.Transformer",
        "1:Dense",
        "2:Pooling",
        "3:Dropout",
        "4:Dense",
        "5:LayerNorm",
        "6:Normalize",
    )
    write(
        tmp_path,
        {
            "modules.json": modules,
            "1/config.json": on_tokens,
            "2/config.json": pooling,
            "4/config.json": dense,
            "5/config.json": {"dimension": 4},
            "6/config.json": {"module_input_name": "sentence_embedding"},
        },
    )
    found = read_modules(tmp_path)
    assert found.steps == (
        DenseStep(
            directory=tmp_path / "1", inputs=8, outputs=8, bias=True, activation="Tanh", on_tokens=True
        ),
        PoolStep(modes=("lasttoken", "cls"), with_prompt=False),
        DenseStep(
            directory=tmp_path / "4", inputs=16, outputs=4, bias=False, activation="Identity", residual=True
        ),
        LayerNormStep(directory=tmp_path / "5", width=4),
        NormalizeStep(),
    )
    assert (found.width(8), found.normalizes) == (4, True)
    assert not found.pools_prompt


def test_flags_of_pooling_have_an_order(tmp_path: Path) -> None:
    flags = {
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": True,
        "pooling_mode_cls_token": True,
    }
    write(tmp_path, {"modules.json": listed(":Transformer", "1:Pooling"), "1/config.json": flags})
    assert read_modules(tmp_path).steps == (PoolStep(modes=("cls", "max", "mean")),)


def test_cross_encoders(tmp_path: Path) -> None:
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    write(
        tmp_path,
        {
            "modules.json": listed(":Transformer", "1:LogitScore"),
            "sentence_bert_config.json": {"transformer_task": "text-generation"},
            "config.json": identity,
            "1/config.json": {"true_token_id": 9, "false_token_id": 0},
        },
    )
    found = read_modules(tmp_path)
    assert (found.output, found.label_activation) == ("logits", "Identity")
    assert found.steps == (LogitScore(true_token=9, false_token=0),)
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    write(tmp_path, {"config.json": old, "1/config.json": {"true_token_id": 9}})
    found = read_modules(tmp_path)
    assert found.label_activation == "Sigmoid"
    assert found.steps == (LogitScore(true_token=9, false_token=None),)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"modules.json": "["}, "modules.json: Expecting"),
        ({"modules.json": {}}, "modules.json: has to be a list"),
        ({"modules.json": [1]}, "a module is 1; it has to be an object"),
        (
            {"modules.json": listed("1:Pooling")},
            "'sentence_transformers.models.Pooling' cannot be run",
        ),
        ({"modules.json": listed(":Transformer", "1:LSTM")}, "LSTM' cannot be run; those that can: Transf"),
        ({"modules.json": listed("1:Dropout")}, "the first module has to be a Transformer"),
        ({"1/config.json": {"pooling_mode": "median"}}, r"pooling_mode is \['median'\]; allowed: cls, max"),
        ({"1/config.json": []}, "1/config.json: has to be a JSON object"),
        ({"2/config.json": {"in_features": 0}}, "in_features is 0, it has to be an integer from 1 to"),
        (
            {"2/config.json": {"in_features": 1, "out_features": 1, "activation_function": "my.Tanh"}},
            "activation_function is 'my.Tanh'; allowed, of torch.nn: ELU, GELU",
        ),
        (
            {"2/config.json": {"in_features": 1, "out_features": 1, "module_output_name": "other"}},
            "module_input_name is 'sentence_embedding' and module_output_name 'other'; allowed: both tok",
        ),
        ({"sentence_bert_config.json": {"max_seq_length": "long"}}, "max_seq_length is 'long', it has"),
        ({"sentence_bert_config.json": {"transformer_task": "fill-mask"}}, "transformer_task is 'fill-mask'"),
        ({"config.json": {"function_to_apply": "tanh"}}, "function_to_apply is 'tanh'; allowed: none, sig"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, files: dict[str, Any], error: str) -> None:
    good = {
        "modules.json": listed(":Transformer", "1:Pooling", "2:Dense"),
        "1/config.json": {},
        "2/config.json": {"in_features": 1, "out_features": 1},
    }
    write(tmp_path, good)
    assert read_modules(tmp_path).stated
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=error):
        read_modules(tmp_path)
