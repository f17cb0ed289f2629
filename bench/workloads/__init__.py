"""Workloads: data sets, random prompts, traces, arrivals, frozen workloads."""
