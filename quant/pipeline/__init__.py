"""The streaming pipeline: estimate, preflight, session, run, publish."""
