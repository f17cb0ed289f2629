"""Checkpoints as they come: tensors, architecture, families, experts, meta models."""
