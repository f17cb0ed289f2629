"""Existing checkpoints: read, requantize, convert, merge adapters, verify."""
