"""ggml's block quantization types, as GGUF files hold them."""
