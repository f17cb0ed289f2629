"""Trellis-coded quantization (QTIP) in EXL3's variant: codebooks, tiles, Viterbi search, incoherence."""
