"""Elementwise kernels: RMSNorm, gated activations (SwiGLU, GeGLU), fused RoPE + KV-cache write."""
