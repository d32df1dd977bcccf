"""``penstock gateway --check``: what is wrong with the options, and what they come to."""
