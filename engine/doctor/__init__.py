"""What `llmopt doctor` prints: the machine, the kernel table, the self-test of every kernel."""
