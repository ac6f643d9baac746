"""From results to their use: estimator, scorer, model folder, export, service, report."""
