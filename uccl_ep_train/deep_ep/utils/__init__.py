"""What programs import from `deep_ep.utils`."""

from uccl_ep_train.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
