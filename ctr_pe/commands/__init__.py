"""The commands of ``ctr-pe``, one file each.

``add_parser(commands)`` adds a command's options and sets ``run`` to a function of the parsed arguments that returns an
exit code. That function imports torch and the like only when it runs, so that help and lists are fast, and passes plain
values to a function that scripts can call too.
"""
