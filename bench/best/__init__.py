"""The best checkpoint of a model for hardware and promises: the search, its finalists, and the decision."""
