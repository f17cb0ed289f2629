"""The decoder itself, the families that it covers, and loading weights into it."""
