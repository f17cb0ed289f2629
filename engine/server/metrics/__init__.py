"""Prometheus exposition of the metrics, and live snapshots of the engine state."""
