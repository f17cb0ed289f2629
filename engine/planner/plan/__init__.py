"""Deployment plans: options, solver, formulas, JSON."""
