"""From a plan to the bytes of a folder, and back to check them."""
