"""Capture and replay of a step: CUDA graphs, and recordings of native calls on a CPU."""
