"""Admission of requests: API keys and their limits, middleware, log lines, traces, files read again."""
