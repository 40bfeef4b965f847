"""Text to token ids: tokenizer.json, chat templates, and the process that bounds their work."""
