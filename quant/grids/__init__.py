"""Where codes lie: integer, float, codebook, lookup and block grids, and rounding to them."""
