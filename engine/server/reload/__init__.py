"""Files that are read again while the server runs."""
