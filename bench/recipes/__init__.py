"""Recipes: the YAML schema of workflows, their stages and results."""
