"""The gateway: picks an endpoint, relays its stream, and says truthfully how each request ended."""
