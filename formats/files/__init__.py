"""Files read with limits and written whole or not at all."""
