"""Tensor parallelism of a model's weights: which rows and columns a rank holds, and its collectives."""
