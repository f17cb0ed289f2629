"""Perplexity, KL divergence, tasks of lm-eval, layer errors."""
