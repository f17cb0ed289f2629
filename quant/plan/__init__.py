"""Planning before any work: request, selection, loaders of the result; journal and manifest."""
