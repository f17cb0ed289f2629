"""The arithmetic of serving: model shapes, bytes, device facts, roofline. Plain Python, no torch."""
