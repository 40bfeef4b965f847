"""Commands of lowbit-run in files of their own: parse, call a library function, show."""
