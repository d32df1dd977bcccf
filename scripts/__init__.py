"""Scripts of the repository: ``python -m scripts.gpu.run``, and files that run by themselves."""
