"""Turns calls into native operations. The only folder that imports `_native`."""
