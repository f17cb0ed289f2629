"""Model quality: passages, scores per position and per item, perplexity and KL divergence with intervals."""
