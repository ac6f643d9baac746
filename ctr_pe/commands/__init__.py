"""The commands of ``ctr-pe``, one file each.

A command's docstring is its help: one line, a description, examples. ``add_options(parser)`` adds its options, and
``run`` is a function of the parsed arguments that returns an exit code. It imports torch and the like only when it
runs, so that help and lists are fast, and passes plain values to a function that scripts can call too.
"""
