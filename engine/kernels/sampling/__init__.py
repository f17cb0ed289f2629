"""Sampling kernels: penalties, token masks, min-p / top-k / top-p, exponential-race sampling."""
