"""Sites: which layers read one tensor, and what they depend on."""
