"""Reports and figures of results and of models."""
