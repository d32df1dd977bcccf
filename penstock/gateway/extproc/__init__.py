"""The gateway as Envoy's external processor: it picks endpoints, Envoy relays and reports outcomes."""
