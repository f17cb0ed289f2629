"""Engine thread, its bridge to the asyncio event loop, and server metrics."""
