"""Pictures in the torch engine: which models see, their encoders, and features in the forward pass."""
