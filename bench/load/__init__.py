"""Load generation: in process, and over HTTP by worker processes; servers under load and their metrics."""
