"""The original, or a packed model, run layer by layer by transformers' own modules."""
