"""What crosses between vLLM's engine processes and the processes here that attach them."""
