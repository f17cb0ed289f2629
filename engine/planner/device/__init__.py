"""Devices and their facts, the roofline, expected speed, prices."""
