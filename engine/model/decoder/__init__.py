"""The native decoder, its model families, and weight loading."""
