"""What quantization kinds share: tensors, grids, the transforms of codes, formats, and raw reading."""
