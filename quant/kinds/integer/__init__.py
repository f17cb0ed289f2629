"""Integer weights on a uniform grid, with a scale for each group of input channels (GPTQ, AWQ, RTN)."""
