"""Terminal output: consoles, progress, and result tables."""
