"""Linear layers: one token, several, prompts; packed and dense weights."""
