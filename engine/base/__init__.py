"""Shared basics: sampling parameters, device, host, units. Imports no other part of the engine."""
