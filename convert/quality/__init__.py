"""Distance of a packed checkpoint from its source: weights and logits."""
