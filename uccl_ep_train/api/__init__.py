"""The face: `Buffer` and what it hands out. Programs import from `uccl_ep_train`."""
