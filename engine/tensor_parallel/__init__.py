"""Worker processes of a tensor-parallel engine, and the channel that broadcasts steps to them."""
