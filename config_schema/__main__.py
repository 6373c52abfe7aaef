"""Write the JSON Schema beside this package."""

from .generate import SCHEMA_FILE, render

SCHEMA_FILE.write_text(render(), encoding="utf-8")
print(SCHEMA_FILE)
