"""A reverse proxy before an inference engine: which version made which tokens, and no token of unconfirmed weights."""
