"""LoRA adapters: the table of loaded ones, and the agreed list. Imports no torch."""
