"""Quantization kinds: a folder each, and the registry that lists them."""
