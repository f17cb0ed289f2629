"""C kernels: compiled once per machine for the best instruction set, loaded with ctypes."""
