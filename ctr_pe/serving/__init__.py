"""From results to their use: a trained model as a folder, a scorer of raw ids, an estimator on DataFrames, a report."""
