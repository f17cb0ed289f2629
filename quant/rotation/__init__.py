"""Rotations R1 and R2 folded into a checkpoint offline (QuaRot, SpinQuant)."""
