"""Studies of several runs: recipes and paired starts of two builds."""
