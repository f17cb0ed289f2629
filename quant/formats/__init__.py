"""How a `IntTensor` lies on disk: one file per format, each a writer and a reader."""
