"""Model quality: perplexity, KL divergence, lm-eval tasks, layer errors."""
