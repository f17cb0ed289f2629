"""Quantization methods, one file each: from a layer's weights to quantized tensors."""
