"""LoRA adapters in the torch engine: their weights, and the products of a step."""
