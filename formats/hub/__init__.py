"""Models of the Hugging Face Hub."""
