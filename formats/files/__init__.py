"""Files: bounded reading, and writing that leaves the old or the new content."""
