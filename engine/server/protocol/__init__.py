"""Request bodies, errors, structured-output options: what clients may send, and the server's own options."""
