"""Device memory: weights, activations, and the KV-cache budget."""
