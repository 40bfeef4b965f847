"""Tasks through lm-evaluation-harness."""
