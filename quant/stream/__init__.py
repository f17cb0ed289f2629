"""Calibration samples, a decoder run on them layer by layer, and KV-cache scales."""
