"""What options need and exclude, as tables, and the check of a config by them."""
