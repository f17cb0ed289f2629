"""Independent reader of quantized checkpoints for `verify`, written with numpy alone.

It is written from the formats' descriptions and shares no code with the writers or the engine's reader, so
a bug in one is not masked by the other. It favours simplicity over speed.
"""
