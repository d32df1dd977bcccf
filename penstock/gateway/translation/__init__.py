"""Messages and responses as chat completions, for model servers that speak nothing else."""
