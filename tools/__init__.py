"""Programs that write what is kept in the repository: ``python -m tools.…`` in the project's root."""
