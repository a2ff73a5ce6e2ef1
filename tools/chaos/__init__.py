"""Faults on the wire between a client and an object store, and a soak test under them."""
