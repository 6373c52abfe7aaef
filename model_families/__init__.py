"""One TOML file per model family: facts, no code."""
