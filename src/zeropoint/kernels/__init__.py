"""Backends, which :mod:`zeropoint.ops.registry` finds by name; nothing else imports them."""
