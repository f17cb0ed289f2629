"""Shared by all of `quant`: schemes, errors, progress, atomic file I/O."""
