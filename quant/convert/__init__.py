"""Existing checkpoints: read, requantize, convert, verify."""
