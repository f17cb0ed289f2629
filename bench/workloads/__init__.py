"""What a run sends: data sets, random prompts, traces, arrivals, frozen workloads."""
