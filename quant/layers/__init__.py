"""One decoder layer: quantized, its statistics kept, its outputs propagated."""
