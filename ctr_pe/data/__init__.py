"""Data sets: built from logs, fetched, generated; opened only when complete; read in batches."""
