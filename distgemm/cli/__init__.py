"""The ``distgemm`` command: one file for each subcommand."""
