"""One training step without memory, measured block by block. Imports torch."""
