"""Options of the server's operation."""
