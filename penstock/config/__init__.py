"""Options: one definition each, read from command line, environment, YAML file and defaults."""
