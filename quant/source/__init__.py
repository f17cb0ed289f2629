"""Opening what a user names: a model argument to a checkpoint, its tokenizer and its processor."""
