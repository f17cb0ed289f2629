"""The decoder: a declarative spec, the modules that it describes, and the loader of their weights."""
