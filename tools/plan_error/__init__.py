"""Held-out error of the plan's speed against measured deployments, and the fit of its parameters."""
