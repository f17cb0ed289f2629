"""Modules of a decoder layer: attention, RoPE, MLP, mixture of experts, norms, linear projections."""
