"""The first run on a GPU machine, rehearsed with the CUDA builds of torch on a CPU."""
