"""Paired starts: two builds measured in fresh processes that alternate, until the verdict is settled."""
