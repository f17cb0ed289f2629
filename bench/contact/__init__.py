"""First contact with a GPU: its stages, their record, and the page that says which expectation failed."""
