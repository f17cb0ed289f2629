"""What the kernels of all operations share: dispatch, building and launching C, Triton's runtime."""
