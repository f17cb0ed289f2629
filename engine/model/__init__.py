"""Models: declarative specs, decoder layers, weight loading, LoRA, tensor-parallel shards."""
