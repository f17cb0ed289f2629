"""Device specifications, roofline model, expected step times, costs."""
