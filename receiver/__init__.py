"""Everything on an inference host: follow a stream, patch the local checkpoint, activate it on the engine."""
