"""The head for multi-token prediction: run, counted on a text, and trained."""
