"""Stalls at random and a drifting clock: `make test-jitter SEED=1,2,3`."""
