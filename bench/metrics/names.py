"""The metrics of serving by name, and how each is computed."""

from __future__ import annotations

LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99")
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client Queue Time",
    "e2el_including_client_queue": "End-to-end Latency incl. Client Queue",
}
FORMULAS = {
    "ttft": "first chunk − sent, per request; `sent` is after the concurrency limit let it go",
    "tpot": "(e2el − ttft) / (output tokens − 1), per request with at least two tokens; each request "
    "weighs the same",
    "itl": "gap between consecutive chunks, all gaps of all requests pooled; a chunk may hold "
    "several tokens",
    "e2el": "last chunk − sent, per request",
    "client_queue_time": "sent − scheduled, per request",
    "e2el_including_client_queue": "last chunk − scheduled, per request",
    "token_gap": "the gap before a chunk divided over its tokens: one value per token",
    "ttft_from_schedule": "first chunk − scheduled, per request",
    "duration": "start of the pass to the last completion, ramp and drain included; with --duration that "
    "window alone, and throughput counts the completions and tokens within it; passes are summed",
    "request_throughput": "completed requests / duration",
    "output_throughput": "generated tokens of completed requests / duration",
    "total_token_throughput": "(prompt + generated tokens of completed requests) / duration",
    "request_goodput": "completed requests that meet every limit / duration",
    "slo_share": "completed requests that meet every limit of --goodput / all requests, failed ones too",
    "joules_per_token": "energy of sockets and GPU during a pass / its generated tokens; where nothing is "
    "generated, / its prompt tokens",
    "max_output_tokens_per_s": "most chunks in one whole second since the first send, as vLLM counts",
    "max_concurrent_requests": "most requests alive within one whole second, as vLLM counts",
    "percentiles": "linear interpolation between order statistics (numpy); std divides by n",
}
