"""GGUF: ggml's model file; tensors, metadata keys, tokenizer, as llama.cpp reads them."""
