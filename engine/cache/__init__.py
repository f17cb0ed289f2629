"""The paged KV cache on the device, and the input tensors of a step that address it."""
