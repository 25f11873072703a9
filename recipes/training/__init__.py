"""The training itself: by our own loop, or by Megatron-LM."""
