"""Layer-by-layer execution of a decoder, and KV-cache scales."""
