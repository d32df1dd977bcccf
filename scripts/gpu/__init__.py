"""All measurements on one GPU in a few minutes: ``python -m scripts.gpu.run``; docs/gpu.md describes them."""
