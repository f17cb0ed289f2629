"""Metrics in Prometheus' text format, and the state of the engine for whoever watches."""
