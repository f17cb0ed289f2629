"""Requests of the server: admission, the engine thread that runs them, metrics, records and traces."""
