"""Load tests of whole servers: a mixed load with killed processes, and the gateway under failing requests."""
