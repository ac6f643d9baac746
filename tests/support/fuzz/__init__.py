"""Broken and hostile inputs, and what commands answer to them."""
