"""GGUF: ggml's container of tensors in blocks, with all that llama.cpp needs to run a model."""
