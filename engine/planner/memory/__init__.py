"""What memory is spent on, and the size of the KV cache that is left."""
