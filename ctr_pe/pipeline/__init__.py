"""Into a ranking pipeline: a trained model as a folder, a scorer of raw ids, an estimator on DataFrames."""
