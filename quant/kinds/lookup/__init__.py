"""SqueezeLLM: a lookup table per output channel, and a sparse matrix of float weights."""
