"""In-process load driver, and the breakdown of engine steps into phases."""
