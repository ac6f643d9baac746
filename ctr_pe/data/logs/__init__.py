"""Where data sets come from, side by side: a log, a published set, the CSV files of a FuxiCTR config.

Each is a function that reads its input, adds rows to a :class:`~ctr_pe.data.writer.DatasetWriter` and returns their
:class:`~ctr_pe.data.writer.Content`.
"""
