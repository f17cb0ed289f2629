"""`llmopt doctor`: machine report, kernel table, and self-test of every kernel."""
