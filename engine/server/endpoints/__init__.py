"""One module an endpoint, and what they share to turn requests into responses."""
