"""Quantization that looks at what flows through the model: texts, statistics, methods."""
