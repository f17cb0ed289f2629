"""Carrying out a recipe: quantize, verify, bench, compare, report."""
