"""The base of all quantization kinds: tensors, grids, the transforms of codes, formats, and raw reading."""
