"""Model quality: passages, scores per position, perplexity and KL divergence with intervals."""
