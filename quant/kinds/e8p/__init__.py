"""QuIP#'s points of the E8 lattice between Hadamard transforms."""
