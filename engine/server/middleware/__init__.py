"""What a request passes before any endpoint sees it: size, key, rate limits."""
