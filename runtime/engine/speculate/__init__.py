"""Speculation: drafts of the next tokens, and the steps that check them."""
