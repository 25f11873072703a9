"""`import deep_ep_cpp` means `uccl_ep_train.deep_ep` where this file's parent folder is on the path."""

from uccl_ep_train.deep_ep import install

install(replace=True)
