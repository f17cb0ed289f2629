"""The command line: one file per command. Arguments, tables, exit codes; no logic."""
