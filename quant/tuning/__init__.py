"""Tuning of rounding, ranges and scales by gradients, block by block."""
