"""Grids of seeded runs that go on where they stopped, their store, statistics and tables."""
