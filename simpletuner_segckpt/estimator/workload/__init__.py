"""From a config to the shapes of one training step, and the model that takes it."""
