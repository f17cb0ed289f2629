"""Everything that can be known to go wrong before any work is done, and who can load the result."""
