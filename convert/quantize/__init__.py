"""Codes and scales chosen by what the layers do to text."""
