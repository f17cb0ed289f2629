"""The HTTP load client: worker processes that send, read and stamp, and nothing else while they do."""
