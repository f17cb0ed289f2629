"""Endpoints of pooled prompts: embeddings, scores and reranking."""
