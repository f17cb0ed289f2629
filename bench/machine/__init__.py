"""The machine of a measurement: its environment, state, load, energy, measured ceilings, roofline."""
