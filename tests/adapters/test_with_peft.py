"""Adapters as PEFT itself saves them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.adapter_files import describe_adapter, read_adapter
from penstock.adapters.errors import AdapterError

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch may be absent
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(16, 24)
        self.v_proj = torch.nn.Linear(16, 8)


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]  # likewise
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])


def save(directory: Path, **config: Any) -> Any:
    """The model with an adapter, which is saved."""
    options = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]} | config
    with warnings.catch_warnings(action="ignore"):  # of what some configurations are good for
        model = peft.get_peft_model(Model(), peft.LoraConfig(init_lora_weights=False, **options))
        model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj"]},
        {"rank_pattern": {"layers.1.q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"rank_pattern": {r".*\.(q_proj|k_proj)": 3}, "alpha_pattern": {r"^layers\.0\.v_proj|1.v_proj$": 7}},
        {"rank_pattern": {"layers.0.q_proj": 2, "q_proj": 1}, "use_rslora": True},
    ],
)
def test_layers_weights_and_scalings_are_those_of_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    model = save(tmp_path / "a", **config)
    files = describe_adapter(str(tmp_path / "a"))
    data = read_adapter(str(tmp_path / "a"), files.digest).data
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert files.modules.keys() == layers.keys()
    assert files.rank == max(layer.r["default"] for layer in layers.values())
    for name, layer in layers.items():
        pair = files.modules[name]
        assert pair.scaling == layer.scaling["default"]
        for view, weight in (
            (pair.a, layer.lora_A["default"].weight),
            (pair.b, layer.lora_B["default"].weight),
        ):
            read = torch.frombuffer(data[view.start : view.end], dtype=torch.float32).reshape(view.shape)
            assert torch.equal(read, weight)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"rank_pattern": {r"layers\.[01]\.q_proj": 3}}, r"rank_pattern: .* is not supported: a pattern is"),
        ({"modules_to_save": ["v_proj"], "target_modules": ["q_proj"]}, "modules_to_save is not supported"),
    ],
)
def test_what_peft_saves_and_is_not_run(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    save(tmp_path / "a", **config)
    with pytest.raises(AdapterError, match=message):
        describe_adapter(str(tmp_path / "a"))
