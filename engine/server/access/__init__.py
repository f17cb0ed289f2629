"""Who may ask, and how much: API keys, their file, rate limits and usage."""
