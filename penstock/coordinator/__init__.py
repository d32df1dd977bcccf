"""The coordinator: collects engines' loads and processes' metrics, and sends them to all API servers."""
