"""What a run leaves besides weights: journal, manifest, record of a conversion."""
