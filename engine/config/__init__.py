"""Options of the engine, of speculation and of adapters, and which of them refuse each other."""
