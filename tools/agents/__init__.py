"""Agents and clients as they come, each a turn of every kind against a served scripted model."""
