"""Calibration data: texts, samples, leakage checks."""
