"""Mixture of experts: token permutation and grouped GEMMs."""
