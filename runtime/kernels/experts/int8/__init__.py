"""Experts with x in eight bits: one chain of groups for every token, alone or in company."""
