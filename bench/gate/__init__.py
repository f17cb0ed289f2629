"""Regression gate: limits, verdict, its output formats and its error rates."""
