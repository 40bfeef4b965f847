"""The state of sequences between two steps: pages, recurrent states, sampler rows, host rings."""
