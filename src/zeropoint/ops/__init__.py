"""The operators on raw tensors: reference, backends, and their registration with torch."""
