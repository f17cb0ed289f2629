"""Run folders: atomic writes, also under Ctrl-C."""
