"""Measurement: workloads, load generation, metrics, quality, reports and comparison."""
