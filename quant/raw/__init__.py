"""A second reader of quantized checkpoints, written from the formats' descriptions with numpy alone.

It shares no code with the writers, nor with the reader that the engine uses: a mistake in either cannot
hide in both. It is plain rather than fast.
"""
