"""Benchmark sessions: in process, over HTTP, in sweeps, against a base."""
