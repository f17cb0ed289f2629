"""Tensor parallelism of a model: sharding rules, weight slices and collectives."""
