"""QTIP's trellis codes between Hadamard transforms, in EXL3's form."""
