"""Offline batches: OpenAI's batch files, answered by the server's endpoints in this process."""
