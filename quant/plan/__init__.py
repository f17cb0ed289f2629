"""Planning: validation of a request before any work, and loader compatibility of the result."""
