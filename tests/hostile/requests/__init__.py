"""Requests that are legal HTTP and JSON, but too large, too many, or made to reveal what others sent."""
