"""vLLM's engine as a child process: ``vllm serve --headless``, started, attached and ended here."""
