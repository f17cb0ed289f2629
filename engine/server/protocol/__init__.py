"""Request models, structured-output fields, API errors and server options."""
