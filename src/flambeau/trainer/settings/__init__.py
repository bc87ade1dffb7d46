"""The settings of a run: the one source of flags, config.toml and the docs table; torch-free."""
