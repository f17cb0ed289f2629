"""A checkpoint's image processor on Pillow: transformers' classes, and ours where it has none."""
