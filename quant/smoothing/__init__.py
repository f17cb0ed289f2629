"""Foldable pairs of a decoder layer, found on a small random model, and rotations."""
