"""Scheduling policy in plain Python, no torch: requests, scheduler, block pool, prefix cache, step plan."""
