"""Requests, from prompt to text."""
