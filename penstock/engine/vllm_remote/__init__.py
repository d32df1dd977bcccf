"""An engine that runs elsewhere: a headless engine process of ``vllm serve``, over its own wire protocol."""
