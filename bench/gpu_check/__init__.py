"""Check of a GPU for `llmopt doctor --gpu`: kernels, models and quantizers, each next to what is expected."""
