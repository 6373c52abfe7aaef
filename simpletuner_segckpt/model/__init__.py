"""What is known of a model before it runs: its blocks, what is around them, hooks of others."""
