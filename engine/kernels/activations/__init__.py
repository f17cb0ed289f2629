"""Dynamic quantization of activations: per token, per group, per tensor."""
