"""Less memory on the device: blocks computed again, and what waits in the host's memory."""
