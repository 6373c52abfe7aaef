"""From a trainer's config file to checked settings, and back into the file. No torch."""
