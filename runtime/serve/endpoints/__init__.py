"""What the server answers, a file for each family of addresses."""
