"""From a question to a plan: set-up, solver, explanation, JSON."""
