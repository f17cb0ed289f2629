"""Servers that are started for a benchmark: llmopt's own and others'."""
