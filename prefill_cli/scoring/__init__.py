"""Vectors → exact top-k item rows. Knows nothing of prompts or the model."""
