"""Probe: a model's parameters and cache, measured on its transformers module on the meta device."""
