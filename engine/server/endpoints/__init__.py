"""HTTP endpoints, a module for each API, and the request handling that they share."""
