"""Tuning of rounding and ranges by gradients, block by block (AutoRound)."""
