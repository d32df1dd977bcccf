"""Process lifetimes: starts, watches, restarts, drains and ends the processes of ``penstock serve``."""
