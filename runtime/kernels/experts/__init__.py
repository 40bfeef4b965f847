"""Mixtures of experts: routing, decode steps and prompts."""
