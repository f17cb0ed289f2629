"""Loading a model's tokenizer, whatever holds it."""
