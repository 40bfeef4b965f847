"""Experts with x in eight bits: a token has the same bits, alone or in company."""
