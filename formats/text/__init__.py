"""Text and token ids: tokenizer.json, chat templates, and the process that limits their work."""
