"""On-disk formats of quantized weights: one file per format, each a writer and a reader."""
