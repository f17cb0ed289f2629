"""From config.json to a ModelSpec: shapes, names of tensors, RoPE parameters."""
