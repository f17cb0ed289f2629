"""ggml's block quantization types: bit-exact quantization and dequantization."""
