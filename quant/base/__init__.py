"""What all of quantization shares: schemes, errors, progress, atomic file I/O."""
