"""A decoder run one layer at a time, and the KV scales that this yields."""
