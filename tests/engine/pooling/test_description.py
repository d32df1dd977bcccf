"""What model directories make, by their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.pooling.description import PoolingDescription, Runner, describe_pooling
from penstock.wire.pooling import PoolingTask

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}
MINILM: dict[str, Any] = {
    "config.json": BERT,
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 384,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    },
    "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
    "tokenizer_config.json": {"model_max_length": 512},
}
EMBEDS = PoolingTask.EMBED, PoolingTask.TOKEN_EMBED


def describe(tmp_path: Path, runner: Runner = "auto", **files: Any) -> PoolingDescription | None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return describe_pooling(tmp_path, runner)


def described(tmp_path: Path, runner: Runner = "auto", **files: Any) -> PoolingDescription:
    found = describe(tmp_path, runner, **files)
    assert found is not None
    return found


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    found = described(tmp_path, **MINILM)
    assert found == PoolingDescription(tasks=EMBEDS, width=384, max_tokens=256, positions=512)
    assert [found.longest(asked) for asked in (None, 128, 384, 1024)] == [256, 128, 384, 512]


def test_vectors_have_their_own_length_where_no_module_normalizes(tmp_path: Path) -> None:
    assert not described(tmp_path, **MINILM | {"modules.json": MINILM["modules.json"][:2]}).normalizes


def test_prompts_and_similarity(tmp_path: Path) -> None:
    stated = {
        "prompts": {"query": "query: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    found = described(tmp_path, **MINILM | {"config_sentence_transformers.json": stated})
    assert (found.prompts, found.default_prompt) == (stated["prompts"], "query")
    assert found.similarity == "dot"


def test_dense_heads_and_joined_modes_make_the_width(tmp_path: Path) -> None:
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    assert described(tmp_path, **MINILM | {"1_Pooling/config.json": both}).width == 768
    assert described(tmp_path, **{"1_Pooling/config.json": {"pooling_mode": ["cls", "max"]}}).width == 768
    modules = [*MINILM["modules.json"], {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}]
    dense = {"in_features": 768, "out_features": 100, "bias": True}
    assert described(tmp_path, **{"modules.json": modules, "3_Dense/config.json": dense}).width == 100


def test_positions_after_that_of_padding(tmp_path: Path) -> None:
    roberta = BERT | {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert described(tmp_path, **{"config.json": roberta}).max_tokens == 512


def test_a_classifier(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForSequenceClassification"]}
    names = {"0": "no", "1": "yes", "2": "perhaps"}
    found = described(tmp_path, **{"config.json": config | {"id2label": names}})
    assert (found.tasks, found.labels, found.width) == ((PoolingTask.CLASSIFY,), ("no", "yes", "perhaps"), 0)
    # transformers writes no names of two labels
    assert described(tmp_path, **{"config.json": config}).labels == ("LABEL_0", "LABEL_1")
    tokens = config | {"architectures": ["BertForTokenClassification"]}
    assert described(tmp_path, **{"config.json": tokens}).tasks == (PoolingTask.TOKEN_CLASSIFY,)


def test_a_cross_encoder_with_files_of_sentence_transformers(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    files = {"config.json": config, "modules.json": MINILM["modules.json"][:1]}
    assert described(tmp_path, **files).labels == ("LABEL_0",)


def test_an_encoder_without_such_files(tmp_path: Path) -> None:
    for architecture in ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"):
        found = described(tmp_path, **{"config.json": BERT | {"architectures": [architecture]}})
        assert found == PoolingDescription(tasks=EMBEDS, width=384, max_tokens=512, positions=512)
    assert described(tmp_path, **{"config.json": {**BERT, "architectures": None}}).tasks == EMBEDS


def test_a_decoder_generates_unless_its_files_or_the_operator_say_otherwise(tmp_path: Path) -> None:
    assert describe(tmp_path, **{"config.json": LLAMA}) is None
    assert describe(tmp_path, "generate") is None
    assert described(tmp_path, "pooling") == PoolingDescription(
        tasks=EMBEDS, width=64, max_tokens=4096, positions=4096
    )
    assert described(tmp_path, "both").generates
    assert not described(tmp_path, **{"modules.json": MINILM["modules.json"][:1]}).generates
    assert describe(tmp_path, "generate") is None
    assert described(tmp_path, "both").generates


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaModel"]},
        {"use_bidirectional_attention": True},
        {"is_causal": False},
    ],
)
def test_a_decoder_without_text(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert described(tmp_path, **{"config.json": LLAMA | changes}).tasks == EMBEDS


def test_a_decoder_that_classifies(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "reward"}}
    found = described(tmp_path, **{"config.json": config})
    assert (found.tasks, found.labels) == ((PoolingTask.CLASSIFY,), ("reward",))


def test_a_directory_without_a_model_makes_text(tmp_path: Path) -> None:
    assert describe(tmp_path) is None


@pytest.mark.parametrize(
    ("runner", "files", "message"),
    [
        (
            "generate",
            {},
            "BertModel makes vectors or labels; 'generate' of --runner asks for a model of text",
        ),
        ("both", {}, "BertModel makes vectors or labels; 'both' of --runner"),
        ("auto", {"config.json": []}, r"config\.json: has to be a JSON object"),
        ("auto", {"modules.json": [1]}, r"modules\.json: a module is 1"),
        ("auto", {"modules.json": {"type": "x"}}, r"modules\.json: has to be a list of modules"),
        ("auto", {"config.json": {**BERT, "hidden_size": "x"}}, "states no size of vectors"),
        (
            "auto",
            {"config_sentence_transformers.json": {"prompts": {"query": 1}}},
            "prompts is no object of texts",
        ),
        (
            "auto",
            {"config_sentence_transformers.json": {"default_prompt_name": "x"}},
            "default_prompt_name 'x' is none of its prompts",
        ),
        (
            "auto",
            {"config.json": {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 0}},
            "num_labels is 0",
        ),
        (
            "auto",
            {"config.json": {**LLAMA, "architectures": ["Qwen2ForRewardModel"]}},
            "Qwen2ForRewardModel is not supported",
        ),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, runner: Runner, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(tmp_path, runner, **{"config.json": BERT} | files)
