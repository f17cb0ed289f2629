"""LLM.int8(): row-wise int8 weights, and inputs whose outlier channels are computed in 16 bits."""
