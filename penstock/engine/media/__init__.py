"""Pictures in prompts: where their features go, which are kept, and when they are computed."""
