"""The commands of lowbit-convert, one a file: parse, call a library function, show."""
