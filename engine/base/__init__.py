"""What every part of the engine may use: sampling parameters, device, host, units. Imports no other part."""
