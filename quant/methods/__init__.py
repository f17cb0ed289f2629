"""How codes are chosen: one file per method, each turning a weight into a `IntTensor`."""
