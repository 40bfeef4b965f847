"""A conversation in the terminal: its turns, commands, prompt and screen."""
