"""Export of a packed folder into another engine's container, with the same codes and scales."""
