"""How close a packed checkpoint is to its source: weights and logits."""
