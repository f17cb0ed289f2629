"""The ground floor: errors, options, files, progress, the processor and the C build."""
