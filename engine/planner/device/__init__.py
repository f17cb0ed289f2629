"""Devices and what a deployment takes on them: memory, KV-cache size, step times."""
