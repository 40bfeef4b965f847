"""Drafts of the next tokens: where they come from, how many pay, the steps that check them."""
