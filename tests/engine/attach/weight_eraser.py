"""What a test has vLLM's workers do beside their own."""

from __future__ import annotations

from typing import Any


class WeightEraser:
    """Becomes part of vLLM's worker (--worker-extension-cls)."""

    model_runner: Any

    def erase_weights(self) -> None:
        """Set the model's weights, and the adapters', to zero, as the loss of a GPU's memory would."""
        for parameter in self.model_runner.model.parameters():
            parameter.data.zero_()
        manager = self.model_runner.lora_manager._adapter_manager
        for module in manager.modules.values():
            for buffer in (*module.lora_a_stacked, *module.lora_b_stacked):
                buffer.zero_()
