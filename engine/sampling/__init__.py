"""Sampling: logits processing, structured output, token sampling, logprobs."""
