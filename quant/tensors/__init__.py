"""Quantized weights in memory: one file per kind of grid, each with its reference dequantization."""
