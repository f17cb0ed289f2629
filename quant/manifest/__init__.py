"""Records of a run: resume journal, manifest, conversion record."""
