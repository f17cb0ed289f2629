"""Workflows in YAML: what a recipe may say, and what a run of one leaves."""
