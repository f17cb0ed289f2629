"""GEMMs with plain and quantized weights: packing, dequantization, split-K."""
