"""Run folders: whole or not there, also under Ctrl-C."""
