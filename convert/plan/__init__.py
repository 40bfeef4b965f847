"""The fate of every tensor, and the choice of bits under a budget."""
