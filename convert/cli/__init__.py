"""The commands of lowbit-convert, a file each."""
