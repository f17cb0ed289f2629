"""The layer-by-layer pipeline: estimate, preflight, calibrate, quantize, publish."""
