"""Public suites for authors of other engine adapters."""
