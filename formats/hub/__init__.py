"""Folders of the Hugging Face Hub."""
