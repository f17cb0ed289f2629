"""ggml's block types, to the bit: encoding and decoding."""
