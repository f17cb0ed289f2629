"""8-bit floating-point weights (e4m3) with scales per tensor, output channel or block of 128 × 128."""
