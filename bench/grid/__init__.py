"""Grids over server flags and benchmark options: cells, resumable runs, table and Pareto front."""
