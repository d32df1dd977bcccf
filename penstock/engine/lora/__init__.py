"""LoRA adapters: the table of loaded ones, and the desired list. Imports no torch."""
