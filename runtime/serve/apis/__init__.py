"""HTTP endpoints, each with the bodies that it reads and the answers that it writes."""
