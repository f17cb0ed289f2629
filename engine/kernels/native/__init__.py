"""Kernels in plain C, for what torch's own operations do not do well: compiled at first use, kept after."""
