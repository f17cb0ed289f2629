"""Speculative decoding: draft-token proposers, and rejection sampling of their tokens."""
