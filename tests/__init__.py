"""A package, so that `tests/` itself never stands on sys.path,
where `tests/triton` would shadow the `triton` package."""
