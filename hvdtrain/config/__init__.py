"""Options of a run: flags, environment variables and TOML files."""
