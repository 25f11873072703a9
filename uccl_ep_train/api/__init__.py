"""The public classes: `Buffer` and `Trace`. Programs import them from `uccl_ep_train`."""
