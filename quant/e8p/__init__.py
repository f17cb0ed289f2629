"""QuIP#'s lattice codebooks: E8P of 2 bits, with a residual for 3 and 4, and the search in them."""
