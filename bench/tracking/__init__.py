"""Experiment trackers: a finished run folder logged to MLflow or Weights & Biases by their own libraries."""
