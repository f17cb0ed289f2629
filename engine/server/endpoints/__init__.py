"""HTTP endpoints, one module each, and the request handling that they share."""
