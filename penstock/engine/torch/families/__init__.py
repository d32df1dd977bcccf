"""What model families need beyond transformers' definitions."""
