"""The gateway: picks an endpoint for each request, relays the reply, and records the outcome."""
