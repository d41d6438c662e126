"""For tests and benchmarks of the operations: settings, operands, eager PyTorch, and when results are right."""
