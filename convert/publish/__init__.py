"""Publishing a packed folder to a repository on the Hub."""
