"""A packed folder in another engine's container: the same codes and scales, proven."""
