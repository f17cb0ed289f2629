"""A pretended CUDA card: the engine's host code runs as on a GPU, on the CPU, and what a GPU would refuse is told."""
