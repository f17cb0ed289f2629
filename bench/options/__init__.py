"""Everything that a benchmark can be told."""
