"""Checkpoint folders: headers, shards and hashes."""
