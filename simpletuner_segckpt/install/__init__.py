"""Put a schedule on a model and take it off: by ``apply``, or when a script enables it."""
