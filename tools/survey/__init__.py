"""Parts of the model survey: one module a column."""
