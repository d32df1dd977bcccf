"""The coordinator: tells API servers what every engine has to do."""
