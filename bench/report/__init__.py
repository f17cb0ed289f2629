"""Reports: one page per kind of result, with plots and tables."""
