"""Where data sets come from, side by side: a log, a published set, the CSV files of a FuxiCTR config."""
