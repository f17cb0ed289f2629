"""Benchmark options and their validation."""
