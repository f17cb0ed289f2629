"""HTTP middleware: size limits, authentication, per-key concurrency limits."""
