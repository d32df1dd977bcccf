"""What only CUDA devices have: kernels, and recorded decode steps."""
