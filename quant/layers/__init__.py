"""Layer-wise quantization: online or cached calibration statistics, and the quantized layer."""
