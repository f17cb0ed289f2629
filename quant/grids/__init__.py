"""Quantization grids: integer, float, codebook, lookup and block, and rounding to them."""
