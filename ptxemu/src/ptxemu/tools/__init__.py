"""Machine code: what it needs and what it issues."""
