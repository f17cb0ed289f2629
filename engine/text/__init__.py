"""From token ids to text and request outputs: incremental detokenization, stop strings, best-of, pooling."""
