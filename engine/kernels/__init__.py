"""One operation per file: its contract, its reference, and the paths that can serve it."""
