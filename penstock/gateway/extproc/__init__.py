"""The gateway as Envoy's external processor: it picks, Envoy relays and tells how it ended."""
