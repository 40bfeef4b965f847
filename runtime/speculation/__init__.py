"""Drafts of the next tokens, which one step checks together: a right one costs no step of its own.

A step chooses behind every draft what it would have chosen without drafts, with the same bits. A
draft is right if it is that token, so the output never depends on drafts, sampled or not.
"""
