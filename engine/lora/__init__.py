"""Low-rank adapters (Hu et al., 2021): several beside one model, chosen by each request."""
