"""The public benchmark sets in their published form."""
