"""The HTTP server: the APIs of OpenAI and Anthropic over one engine."""
