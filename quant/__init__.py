"""The ground floor: quantization schemes, methods, on-disk formats and the streaming pipeline.

Nothing here is imported by name from this file, so that a floor above which needs no torch
(the planner, `--help`) does not pay for it.
"""
