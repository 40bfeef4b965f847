"""One readable file per architecture: layers over the ops of a backend."""
