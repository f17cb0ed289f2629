"""Infrastructure of all kernels: dispatch, JIT compilation and launch of C, Triton's runtime."""
