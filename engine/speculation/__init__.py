"""Speculative decoding: guesses that one step checks together. They make tokens faster, not different."""
