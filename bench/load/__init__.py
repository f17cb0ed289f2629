"""Driving a target in this process with a workload, and splitting its steps into phases."""
