"""Model specs read from config.json: shapes, tensor names, RoPE parameters, KV layouts."""
