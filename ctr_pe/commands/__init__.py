"""The commands of ``ctr-pe``, one file each.

``add_parser(commands)`` adds a command's options and sets ``run`` to a function of the parsed arguments that returns an
exit code. That function imports what it needs when it runs, so that help and lists answer at once, and hands values,
not the arguments, to a function that scripts can call too.
"""
