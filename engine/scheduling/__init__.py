"""Continuous-batching scheduler in plain Python, no torch: requests, block pool, prefix cache, step plan."""
