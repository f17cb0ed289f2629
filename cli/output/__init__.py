"""What commands print: the two consoles, progress, and results as tables."""
