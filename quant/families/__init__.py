"""Model families: a file each, which every floor reads; `registry` finds the family of a model type."""
