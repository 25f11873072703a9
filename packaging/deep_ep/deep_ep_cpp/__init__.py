"""`import deep_ep_cpp` means `uccl_ep_train.deep_ep` where this package is installed."""

from uccl_ep_train.deep_ep import install

install(replace=True)
