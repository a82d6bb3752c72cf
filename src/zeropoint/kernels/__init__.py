"""Backends. They register with :mod:`zeropoint.ops.registry`, which finds them by name; nothing else imports them."""
