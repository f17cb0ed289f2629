"""What operators see of requests: request ids, log lines, traces."""
