"""GEMMs of weights behind Hadamard transforms: trellis codes (QTIP, EXL3) and lattice codes (QuIP#)."""
