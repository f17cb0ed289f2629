"""Graph capture and replay of a step: CUDA graphs, and CPU graphs of native kernel launches."""
