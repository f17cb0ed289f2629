"""Comparing runs: limits, the verdict, its outputs and its error rates."""
