"""A kind that the product does not know: a folder with all that a kind is."""
