"""PTX text: its grammar, data flow and values, and its translation into Python functions."""
