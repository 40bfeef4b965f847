"""The tensor table of each architecture."""
