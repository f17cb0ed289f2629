"""Shared by all of `quant`: schemes, errors, progress, atomic files, build of C kernels."""
