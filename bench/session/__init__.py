"""Benchmark sessions: in process, over HTTP, sweeps, paired runs against a base, recipes."""
