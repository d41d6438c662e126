"""What instructions do, a module for each family."""
