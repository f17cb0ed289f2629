"""Kernels: per operation an interface, a reference implementation and the kernels that support it."""
