"""lm-eval tasks on an engine or a server: model requests, scores, results per item."""
