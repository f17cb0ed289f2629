"""Studies of several runs: recipes, grids, paired starts of two builds, and the history of runs."""
