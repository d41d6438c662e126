"""Whether results of the operations are right: settings, operands, and agreement with the reference."""
