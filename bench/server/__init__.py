"""Starting inference servers for a benchmark: llmopt, vLLM, llama.cpp, transformers."""
