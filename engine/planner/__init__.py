"""Deployment planner: memory, KV-cache capacity, roofline speed and cost. Plain Python, no torch."""
