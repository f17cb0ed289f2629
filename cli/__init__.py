"""The command line: one module per command. Arguments, tables, exit codes; no logic."""
