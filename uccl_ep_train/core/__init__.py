"""From checked arguments to native operations: the way of a call, and the only door to `_native`."""
