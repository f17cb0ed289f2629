"""4-bit floats (e2m1) with a scale per small block: NVFP4 and MXFP4."""
