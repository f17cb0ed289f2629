"""Studies of several runs: recipes, grids and paired starts of two builds."""
