"""Checks of a checkpoint before it is loaded: engines, cards, structure and silent damage."""
