"""The layer-by-layer pipeline: estimate, preflight, session, run, publish."""
