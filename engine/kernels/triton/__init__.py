"""Kernels for GPUs, in Triton: each beside its wrapper, and held against a torch path by the tests."""
