"""Quality of a packed folder, measured against its original."""
