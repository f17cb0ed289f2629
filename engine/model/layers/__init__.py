"""The modules of a decoder layer: attention, MLP, experts, norms, linear projections."""
