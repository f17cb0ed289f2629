"""Models of transformers that the decoder does not cover, with the engine's paged attention inside."""
