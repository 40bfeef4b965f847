"""Limits of one request."""

MOST_BODY_BYTES = 8 << 20  # a prompt of a million tokens takes 5 MB
MOST_READ_BYTES = 4 * MOST_BODY_BYTES  # of a body that is too long, before the answer
THREAD_BODY_BYTES = 64 << 10  # longer ones are parsed apart from the event loop
MOST_MESSAGES = 4096
MOST_PARTS = 4096  # of a message's content
MOST_IDS = 1 << 20  # token ids of a prompt, or in one object
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_CHOICES = 8  # `n`
MOST_PROMPTS = 128  # in one request for completions
MOST_TOOLS = 128
MOST_CALLS = 1024  # of tools, in one turn
MOST_GRAMMAR_CHARACTERS = 64 << 10  # of a grammar or a regular expression
BODY_TIMEOUT_S = 30.0  # without a further part of a body
LEAST_BODY_RATE = 16 << 10  # bytes a second that a body must keep behind its first 30 s
MOST_HEAD_BYTES = 64 << 10  # of a request line with its headers
