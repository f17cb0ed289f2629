"""Smoothing maps by intervention: foldable pairs of a decoder layer, discovered on a small random model."""
