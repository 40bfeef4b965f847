"""The fate of every tensor, decided by headers and a recipe."""
