"""Everything a sequence leaves on the device between two steps."""
