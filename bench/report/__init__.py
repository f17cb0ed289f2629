"""Reports: a page for each kind of result, with its plots and tables."""
