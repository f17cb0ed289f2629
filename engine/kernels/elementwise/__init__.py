"""Between the GEMMs: norms, gated activations, RoPE with the KV-cache write."""
