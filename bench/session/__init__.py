"""Benchmark sessions: in process, over HTTP, sweeps, paired runs against a base, lm-eval tasks."""
