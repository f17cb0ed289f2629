"""Executing step plans: model runner, capture and replay of steps, step loop, memory profile."""
