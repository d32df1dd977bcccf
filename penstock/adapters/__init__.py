"""Files of LoRA adapters, as users name them: where they may lie, and what they may contain."""
