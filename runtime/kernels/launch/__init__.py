"""Launch sizes, as literal tables, and what a launch asks of the device."""
