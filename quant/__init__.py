"""Weight quantization: schemes, methods, on-disk formats, and the layer-by-layer pipeline.

Nothing is imported here, so that packages above that need no torch
(the planner, `--help`) do not load it.
"""
