"""Images of a prompt: decoding, resizing, patches, and the positions of their tokens."""
