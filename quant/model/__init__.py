"""Unquantized checkpoints: tensors, architecture, layer families, experts, meta-device model."""
