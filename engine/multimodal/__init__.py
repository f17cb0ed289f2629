"""Images: the model's image processor and vision tower, and the cache of its embeddings."""
